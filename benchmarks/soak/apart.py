# SPDX-License-Identifier: Apache-2.0
"""A separate rollout: the process that verl puts beside an engine rank, and the trainer's end of it.

What verl's driver calls through Ray comes through a pipe here. On GPUs the trainer computes on the first of those that
are visible, the rollout on the second, or on the same one where there is one only. Besides ours, verl's own ``nccl``
backend can be at both ends. The two can count as processes of two hosts, which NCCL then connects by sockets; two of
one host it refuses on one GPU.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.soak.trainers import TIMEOUT_SECONDS

VISIBLE = "CUDA_VISIBLE_DEVICES"
SYNC = {"timeout_seconds": TIMEOUT_SECONDS}
STOCK = "nccl"  # verl's backend


def second_gpu(device: str) -> dict[str, str]:
    """The environment of a process that sees nothing but the second of the visible GPUs, or the only one; of none, on a
    CPU."""
    if device != "cuda":
        return {}
    import torch

    visible = os.environ.get(VISIBLE) or ",".join(map(str, range(torch.cuda.device_count())))
    return {VISIBLE: visible.split(",")[:2][-1]}


def count_as_host(name: str) -> None:
    """This process is on a host of that name, for the plugin and for NCCL; before either has asked."""
    from verl_sync_plugin.sync.delivery import reach
    from verl_sync_plugin.sync.separate import membership

    os.environ.update(NCCL_HOSTID=name, NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    reach.host_name = lambda: name
    membership._device_name = lambda device: f"{name}'s {device}"  # on one GPU the plugin would refuse the two


def _sync_of(host: str, delivery: str) -> dict[str, Any]:
    """``custom.sync`` of both ends."""
    return {**SYNC, "delivery": delivery or "auto"}


def receiving(
    server: Any, bucket_bytes: int, sync: dict[str, Any]
) -> tuple[Any, Callable[[Any, int], Coroutine[Any, Any, Any]]]:
    """The rollout's end of the plugin's backend, and what does with its weights as verl's rollout adapter would."""
    from benchmarks.transfer.endpoint import ServerEndpoint
    from verl_sync_plugin.config.settings import SyncConfig
    from verl_sync_plugin.hooks.separate import SyncCheckpointEngine
    from verl_sync_plugin.rollouts.adapter import SeparateReceiver
    from verl_sync_plugin.sync.separate.managers import SeparateRollout
    from verl_sync_plugin.trainers.base import trainer_device

    made: list[SeparateRollout] = []

    def make(incoming: Any) -> SeparateRollout:
        endpoint = ServerEndpoint(server, ranks=incoming.membership.engine_ranks)
        made[:] = [SeparateRollout(incoming.ranks, endpoint, SyncConfig.from_mapping(sync), trainer_device())]
        return made[0]

    receiver = SeparateReceiver(make)

    async def receive(weights: Any, version: int) -> dict[str, float]:
        await receiver.receive(weights, version)
        return dict(made[0].report.stages)

    return SyncCheckpointEngine(bucket_bytes, None, sync=sync, rollout="sglang"), receive


def _stock(server: Any, bucket_bytes: int, cluster: str) -> tuple[Any, Callable[[Any, int], Coroutine[Any, Any, Any]]]:
    """Likewise of verl's backend ``nccl``."""
    from benchmarks.transfer.endpoint import StockPath

    path = StockPath(server)
    return stock_engine(bucket_bytes, False, cluster), lambda weights, version: path.load(weights, bucket_bytes)


def stock_engine(bucket_bytes: int, master: bool, cluster: str | None = None) -> Any:
    """verl's ``nccl`` checkpoint engine in this process.

    Its collectives are Ray's, which want to be called in an actor but ask nothing of it: two drivers of one cluster do.
    Their barrier takes every GPU that a process sees, which in verl is one; this process may see the rollout's as well.

    Args:
        bucket_bytes: size of each of its two buffers.
        master: whether this is trainer rank 0.
        cluster: address of the Ray cluster; if it is not given, a new one.
    """
    import ray
    import ray.util.collective.collective as collective
    from ray.util.collective.collective_group import nccl_util
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    ray.init(cluster, namespace=STOCK, include_dashboard=False, log_to_driver=False)
    collective._check_inside_actor = lambda: None
    nccl_util.get_num_gpus = lambda: 1
    return CheckpointEngineRegistry.new(STOCK, bucket_bytes, is_master=master)


def _rollout(
    pipe: Connection, server: Any, folder: str, bucket_bytes: int, cluster: str | None, host: str, delivery: str
) -> None:
    """The rollout rank: answers calls until the pipe closes."""
    import torch.distributed as dist

    if host:
        count_as_host(host)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{os.getpid()}", rank=0, world_size=1)
    engine, receive = (
        _stock(server, bucket_bytes, cluster) if cluster else receiving(server, bucket_bytes, _sync_of(host, delivery))
    )
    while True:
        try:
            what, given = pipe.recv()
        except EOFError:
            return
        if what == "update_weights":
            answer = asyncio.run(receive(engine.receive_weights(**given), given["global_steps"]))
        else:
            answer = getattr(engine, what)(**given)
        pipe.send(answer)


class Apart:
    """The trainer's end, in this process; makes verl's calls of every sync on both ends.

    Args:
        trained: verl's training engine.
        server: the rollout's.
        bucket_mb: size of a bucket in MiB.
        device: ``cuda`` or ``cpu``.
        folder: where the rollout rank makes its process group.
        stock: by verl's backend ``nccl``, on GPUs only; else by ours.
        host: of the rollout, where it is not this process's.
        delivery: ``custom.sync.delivery``; by default ``exchanged`` between two hosts, else ``auto``.
    """

    def __init__(
        self, trained: Any, server: Any, bucket_mb: int, device: str, folder: Path, stock: bool = False, host: str = "",
        delivery: str = "",
    ) -> None:  # fmt: skip
        from benchmarks.transfer.server import Client
        from verl_sync_plugin.hooks.separate import SyncCheckpointEngine

        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._trained, self._stock, self._version = trained, stock, 0
        cluster = None
        if stock:
            import ray

            self._engine = stock_engine(bucket_mb << 20, True)
            cluster = ray.get_runtime_context().gcs_address
        else:
            self._engine = SyncCheckpointEngine(bucket_mb << 20, True, sync=_sync_of(host, delivery), rollout="sglang")
        ends = (cluster, host, delivery)
        given = (theirs, Client(server.port, server.model), str(folder), bucket_mb << 20, *ends)
        self.process = context.Process(target=_rollout, args=given, daemon=True)
        with patch.dict(os.environ, second_gpu(device)):
            self.process.start()
        theirs.close()

    def _both(self, what: str, ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[Any, Any]:
        """One call on both ends at the same time; its answers."""
        self._pipe.send((what, theirs))
        return getattr(self._engine, what)(**ours), self._pipe.recv()

    def sync(self) -> dict[str, Any]:
        """One sync, with the rounds of calls that verl makes around it; the plugin's report of it, and the stages of
        the rollout rank, of which ``engine_load`` is how long the engine rank read and wrote."""
        self._version += 1
        weights, _ = self._trained.get_per_tensor_param()
        members = self._both("prepare", {}, {})
        ours, theirs = (
            {name: each[0] for name, each in topology.items()}
            for topology in self._engine.build_topology(1, 1, list(members))
        )
        self._both("init_process_group", ours, theirs)
        version = {"global_steps": self._version}
        self._pipe.send(("update_weights", version))
        asyncio.run(self._engine.send_weights(weights, **version))
        stages = self._pipe.recv()
        self._both("finalize", {}, {})
        if self._stock:
            return {}
        manager = self._engine._manager
        assert manager is not None, "it has sent"
        return {**manager.report.as_dict(), "rollout_stages": stages}

    def close(self) -> None:
        self._pipe.close()
        self.process.join(20)
        if self._stock:
            import ray

            ray.shutdown()
