# SPDX-License-Identifier: Apache-2.0
"""A separate rollout: the process that verl puts beside an engine rank, and the trainer's end of it.

What verl's driver calls through Ray comes through a pipe here. On GPUs the trainer computes on the first of those that
are visible, the rollout on the second.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.soak.trainers import TIMEOUT_SECONDS

VISIBLE = "CUDA_VISIBLE_DEVICES"
SYNC = {"timeout_seconds": TIMEOUT_SECONDS}


def second_gpu(device: str) -> dict[str, str]:
    """The environment of a process that sees nothing but the second of the visible GPUs; of none, on a CPU."""
    return {VISIBLE: os.environ.get(VISIBLE, "0,1").split(",")[1]} if device == "cuda" else {}


def _rollout(pipe: Connection, server: Any, folder: str, bucket_bytes: int) -> None:
    """The rollout rank: answers calls until the pipe closes."""
    import torch.distributed as dist

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{os.getpid()}", rank=0, world_size=1)
    from benchmarks.transfer.server import ServerEndpoint
    from verl_sync_plugin.config.settings import SyncConfig
    from verl_sync_plugin.hooks.checkpoint_engine import SyncCheckpointEngine
    from verl_sync_plugin.rollouts.sglang.separate import SeparateReceiver
    from verl_sync_plugin.sync.separate.managers import SeparateRollout
    from verl_sync_plugin.trainers.base import trainer_device

    engine = SyncCheckpointEngine(bucket_bytes, None, sync=SYNC)

    def make(incoming: Any) -> SeparateRollout:
        endpoint = ServerEndpoint(server, ranks=incoming.membership.engine_ranks)
        return SeparateRollout(incoming.ranks, endpoint, SyncConfig.from_mapping(SYNC), trainer_device())

    receiver = SeparateReceiver(make)
    while True:
        try:
            what, *given = pipe.recv()
        except EOFError:
            return
        if what == "prepare":
            pipe.send(engine.prepare())
        elif what == "join":
            pipe.send(engine.init_process_group(*given))
        else:
            asyncio.run(receiver.receive(engine.receive_weights(*given), *given))
            pipe.send(None)


class Apart:
    """The trainer's end, in this process; makes verl's calls of every sync on both ends.

    Args:
        trained: verl's training engine.
        server: the rollout's.
        bucket_mb: size of a bucket in MiB.
        device: ``cuda`` or ``cpu``.
        folder: where the rollout rank makes its process group.
    """

    def __init__(self, trained: Any, server: Any, bucket_mb: int, device: str, folder: Path) -> None:
        from benchmarks.transfer.server import Client
        from verl_sync_plugin.hooks.checkpoint_engine import SyncCheckpointEngine

        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        given = (theirs, Client(server.port), str(folder), bucket_mb << 20)
        self.process = context.Process(target=_rollout, args=given, daemon=True)
        with patch.dict(os.environ, second_gpu(device)):
            self.process.start()
        theirs.close()
        self._engine = SyncCheckpointEngine(bucket_mb << 20, True, sync=SYNC)
        self._stream, _ = trained.get_per_tensor_param()
        self._version = 0

    def _ask(self, *call: Any) -> Any:
        self._pipe.send(call)

    def sync(self) -> dict[str, Any]:
        """One sync, with the rounds of calls that verl makes around it."""
        self._version += 1
        self._ask("prepare")
        members = [self._engine.prepare(), self._pipe.recv()]
        ours, theirs = self._engine.build_topology(1, 1, members)
        self._ask("join", theirs["rank"][0], theirs["members"][0])
        self._engine.init_process_group(ours["rank"][0], ours["members"][0])
        self._pipe.recv()
        self._ask("sync", self._version)
        asyncio.run(self._engine.send_weights(self._stream, self._version))
        self._pipe.recv()
        manager = self._engine._manager
        assert manager is not None, "it has sent"
        return manager.report.as_dict()

    def close(self) -> None:
        self._pipe.close()
        self.process.join(20)
