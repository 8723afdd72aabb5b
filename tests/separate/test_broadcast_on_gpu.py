# SPDX-License-Identifier: Apache-2.0
"""Broadcasts over NCCL from a trainer rank to two rollout ranks of one GPU: in whole syncs, and alone; one may die."""

import asyncio
import os
import pickle
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from several_hosts_on_gpu import digest, play
from verl_sync_plugin.hooks.separate import SyncCheckpointEngine
from verl_sync_plugin.sync.sender import BucketSender, broadcasts_done

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

DEVICE, GPU = "cuda", torch.device("cuda", 0)
BOUND, BUCKET_BYTES = 20.0, 4 << 20
SYNC = {"timeout_seconds": BOUND, "verify": "always"}
TRAINER, DYING = 0, 2
SYNCS = ((1, 3), (2, 3), (3, 3), (4, 2), (5, 2))  # version, and how many ranks take part
FAILING = 3  # in its second bucket


class Calls:
    """The rounds of calls that verl's driver makes around a sync, made by the ranks themselves."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self._store = rank, dist.FileStore(str(folder / "calls"), 3)

    def all_say(self, what: str, said: Any, ranks: int = 3) -> list[Any]:
        """Returns what every rank has to say; call it at most once per ``what``."""
        self._store.set(f"{what}-{self.rank}", pickle.dumps(said))
        return [pickle.loads(self._store.get(f"{what}-{rank}")) for rank in range(ranks)]

    def join(self, engine: Any, what: str, ranks: int) -> Any:
        """Returns the group that the engine has joined with the first ``ranks``."""
        mine = replace(engine.prepare(), device=f"GPU {self.rank}")  # they share one, which the plugin would refuse
        parts = engine.build_topology(1, ranks - 1, self.all_say(f"prepare {what}", mine, ranks))
        places = [place for part in parts for place in zip(part["rank"], part["members"], strict=True)]
        engine.init_process_group(*places[self.rank])
        return engine._membership.ranks


def trainer(calls: Calls, folder: Path) -> list[Any]:
    """Sends other weights in every sync; those of the last one are those of the second."""
    from benchmarks import soak
    from benchmarks.transfer import one_rank

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

        return outcomes(calls, engine, send)


def rollout(calls: Calls, folder: Path) -> list[Any]:
    """Receives; returns the checksums of what its engine holds."""
    from benchmarks.soak import receiving
    from benchmarks.transfer import Server

    alone(calls.rank, folder)
    calls.all_say("model", None)
    options = ("--mem-fraction-static", "0.2")
    with ExitStack() as last:
        server = Server(folder / "small", DEVICE, folder / f"server-{calls.rank}.log", options)
        last.callback(server.stop)
        engine, receive = receiving(server, BUCKET_BYTES, SYNC)
        calls.all_say("ready", None)

        def take(version: int) -> str:
            if calls.rank == DYING and version == FAILING:
                die_in_second_bucket()
            asyncio.run(receive(engine.receive_weights(version), version))
            return digest(server)

        return outcomes(calls, engine, take)


def alone(rank: int, folder: Path) -> None:
    """A world of one rank, as the trainer and each replica here."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{rank}", rank=0, world_size=1)


def die_in_second_bucket() -> None:
    """The server goes, too, as with a machine that is switched off."""
    import psutil

    honest = BucketSender.load

    def dying(self: Any, index: int, slot: int) -> None:
        if index == 1:
            for process in psutil.Process().children(recursive=True):
                process.kill()
            os._exit(9)
        honest(self, index, slot)

    BucketSender.load = dying  # type: ignore[method-assign]


def outcomes(calls: Calls, engine: Any, sync: Callable[[int], Any]) -> list[Any]:
    """Returns what every sync returned, or its error and the seconds that it took."""
    found = []
    for version, ranks in SYNCS:
        calls.join(engine, str(version), ranks)
        started = time.monotonic()
        try:
            found.append(sync(version))
        except Exception as error:
            found.append((f"{type(error).__name__}: {error}", time.monotonic() - started))
    return found


def member(rank: int, folder: Path) -> list[Any]:
    calls = Calls(rank, folder)
    return trainer(calls, folder) if rank == TRAINER else rollout(calls, folder)


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


NBYTES, LARGE, LATE = 3 << 20, 256 << 20, 2.0  # the large one: more than NCCL takes from a rank before others come


def group(rank: int, folder: Path) -> tuple[Calls, Any, Any]:
    """The calls, checkpoint engine and group of one of three ranks."""
    torch.cuda.set_device(GPU)
    alone(rank, folder)
    calls = Calls(rank, folder)
    engine = SyncCheckpointEngine(BUCKET_BYTES, True if rank == TRAINER else None, sync=SYNC, rollout="sglang")
    return calls, engine, calls.join(engine, "first", 3)


def filled(value: int, nbytes: int = NBYTES) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8, device=GPU)


def what_runs_beside_broadcasts(rank: int, folder: Path) -> bool:
    """The trainer begins two to which the others come late; True if neither it nor its own stream waits for them."""
    _, _, ranks = group(rank, folder)
    ranks.broadcast(filled(1), TRAINER).wait()  # connects them
    memory = [filled(rank + number, LARGE) for number in range(2)]
    torch.cuda.synchronize()
    ranks.gather(None)
    if rank:
        time.sleep(LATE)
    started = time.monotonic()
    arrival = partial(broadcasts_done, [ranks.broadcast(each, TRAINER) for each in memory], BOUND, GPU)
    own = torch.cuda.Event()
    filled(7)
    own.record()
    own.synchronize()
    free = time.monotonic() - started < LATE / 2 and not arrival()
    while not arrival():
        time.sleep(1e-3)
    assert [each.unique().tolist() for each in memory] == [[0], [1]]
    ranks.gather(None)
    return free


def the_last_dies(rank: int, folder: Path, when: str) -> tuple[str, float]:
    """Its bytes are waited for in NCCL, which is connecting the ranks; the next group does without it."""
    calls, engine, ranks = group(rank, folder)
    if when in ("connected", "broadcasting"):
        under_way = ranks.broadcast(filled(1), TRAINER)
    if when == "connected":
        under_way.wait()
        torch.cuda.synchronize()
    ranks.gather(None)  # nobody is still connecting by gloo
    if rank == DYING:
        os._exit(9)
    time.sleep(1)
    started, text = time.monotonic(), "no error"
    try:
        if when == "before broadcast":
            ranks.broadcast(filled(1), TRAINER)
        else:
            works, end = [ranks.broadcast(filled(2), DYING)], time.monotonic() + BOUND
            while not broadcasts_done(works, BOUND, GPU) and time.monotonic() < end:
                time.sleep(1e-2)
            text = "nothing has come"
    except RuntimeError as error:
        text = str(error)
    engine._membership.leave()
    seconds = time.monotonic() - started
    ranks = calls.join(engine, "next", 2)
    memory = filled(rank)
    ranks.broadcast(memory, TRAINER).wait()
    assert torch.equal(memory, filled(TRAINER)), "the next group is whole"
    ranks.gather(None)
    return text, seconds


def test_a_rank_goes_on_while_its_bytes_are_on_their_way(tmp_path: Path) -> None:
    """So the next bucket is packed meanwhile."""
    assert play(3, what_runs_beside_broadcasts, tmp_path)[TRAINER] is True


@pytest.mark.parametrize("when", ["before broadcast", "connected", "broadcasting"])
def test_a_member_that_dies_before_the_first_bytes_is_waited_for_within_the_bound(when: str, tmp_path: Path) -> None:
    *left, dead = play(3, the_last_dies, tmp_path, when)
    assert dead is None
    for said in left:
        assert isinstance(said, tuple), said
        assert said[0] != "no error" and said[1] < BOUND + 5, said
