# SPDX-License-Identifier: Apache-2.0
"""Whole syncs by broadcast over NCCL, of a trainer rank and two real engines: also when a rollout rank dies in one.

All three are on the same GPU, see ``several_hosts_on_gpu``.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from several_hosts_on_gpu import count_as_host, digest, play

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

DEVICE = "cuda"
BOUND, BUCKET_BYTES = 20.0, 4 << 20
SYNC = {"timeout_seconds": BOUND, "verify": "always"}
TRAINER, DYING = 0, 2
SYNCS = ((1, 3), (2, 3), (3, 3), (4, 2), (5, 2))  # version, and how many ranks take part
FAILING = 3  # in its second bucket


class Calls:
    """The rounds of calls that verl's driver makes around a sync, made by the ranks themselves."""

    def __init__(self, rank: int, folder: Path) -> None:
        import torch.distributed as dist

        self._rank, self._store = rank, dist.FileStore(str(folder / "calls"), 3)

    def all_say(self, what: str, said: Any, ranks: int = 3) -> list[Any]:
        """Returns what every rank has to say; call it at most once per ``what``."""
        self._store.set(f"{what}-{self._rank}", pickle.dumps(said))
        return [pickle.loads(self._store.get(f"{what}-{rank}")) for rank in range(ranks)]

    def join(self, engine: Any, version: int, ranks: int) -> None:
        said = self.all_say(f"prepare {version}", engine.prepare(), ranks)
        parts = engine.build_topology(1, ranks - 1, said)
        places = [place for part in parts for place in zip(part["rank"], part["members"], strict=True)]
        engine.init_process_group(*places[self._rank])


def trainer(calls: Calls, folder: Path) -> list[Any]:
    """Sends other weights in every sync; those of the last one are those of the second."""
    from benchmarks import soak
    from benchmarks.transfer import one_rank
    from verl_sync_plugin.hooks.separate import SyncCheckpointEngine

    with one_rank(folder / "trainer", DEVICE):
        trained = soak.engine("fsdp2", "small", folder / "small", DEVICE)
        calls.all_say("model", None)
        turned, engine = soak.Turned(trained), SyncCheckpointEngine(BUCKET_BYTES, True, sync=SYNC, rollout="sglang")
        calls.all_say("ready", None)

        def send(version: int) -> list[int]:
            turned.turn()
            weights, _ = trained.get_per_tensor_param()
            asyncio.run(engine.send_weights(weights, version))
            return [engine._manager.report.buckets]

        return [outcome(calls, engine, version, ranks, lambda v=version: send(v)) for version, ranks in SYNCS]


def rollout(rank: int, calls: Calls, folder: Path) -> list[Any]:
    """Receives; returns the checksums of what its engine holds."""
    import torch.distributed as dist

    from benchmarks.soak import receiving
    from benchmarks.transfer import Server

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{rank}", rank=0, world_size=1)
    calls.all_say("model", None)
    options = ("--mem-fraction-static", "0.2")
    with ExitStack() as last:
        server = Server(folder / "small", DEVICE, folder / f"server-{rank}.log", options)
        last.callback(server.stop)
        engine, receive = receiving(server, BUCKET_BYTES, SYNC)
        calls.all_say("ready", None)

        def take(version: int) -> str:
            if rank == DYING and version == FAILING:
                die_in_second_bucket()
            asyncio.run(receive(engine.receive_weights(version), version))
            return digest(server)

        return [outcome(calls, engine, version, ranks, lambda v=version: take(v)) for version, ranks in SYNCS]


def die_in_second_bucket() -> None:
    """The server goes, too, as with a machine that is switched off."""
    import psutil

    from verl_sync_plugin.sync.sender import BucketSender

    honest = BucketSender.load

    def dying(self: Any, index: int, slot: int) -> None:
        if index == 1:
            for process in psutil.Process().children(recursive=True):
                process.kill()
            os._exit(9)
        honest(self, index, slot)

    BucketSender.load = dying  # type: ignore[method-assign]


def outcome(calls: Calls, engine: Any, version: int, ranks: int, sync: Any) -> Any:
    """Returns what a sync returned, or its error and the seconds that it took."""
    calls.join(engine, version, ranks)
    started = time.monotonic()
    try:
        return sync()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started


def member(rank: int, folder: Path) -> list[Any]:
    count_as_host(f"host {rank}")
    calls = Calls(rank, folder)
    return trainer(calls, folder) if rank == TRAINER else rollout(rank, calls, folder)


def test_a_rollout_rank_that_dies_in_a_broadcast_costs_that_sync_alone(tmp_path: Path) -> None:
    sent, staying, dying = play(3, member, tmp_path, seconds=350.0)
    assert dying is None
    assert isinstance(sent, list) and isinstance(staying, list), (sent, staying)
    assert all(outcome[0] > 3 for number, outcome in enumerate(sent) if number + 1 != FAILING), sent
    first, second, failed, fourth, fifth = staying
    for said in (sent[FAILING - 1], failed):
        assert "a rank died" in said[0] and said[1] < 3 * BOUND + 60, said
    assert len(first) == len(second) > 0 and first != second, "every sync has brought other weights"
    assert fourth == second and fifth == first, "the weights of the fourth sync are those of the second"
