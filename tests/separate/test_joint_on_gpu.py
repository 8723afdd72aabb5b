# SPDX-License-Identifier: Apache-2.0
"""The group of trainer and rollout ranks on a GPU, where the bytes of weights travel by NCCL."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from several_hosts_on_gpu import play
from verl_sync_plugin.sync.sender import arrived
from verl_sync_plugin.transport.joint import JointRanks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

BOUND, NBYTES, GPU = 10.0, 3 << 20, torch.device("cuda", 0)
SECONDS = 120.0
LARGE, LATE = 256 << 20, 2.0  # more bytes than NCCL takes from a rank before the others come


def joint(rank: int, folder: Path, name: str) -> JointRanks:
    torch.cuda.set_device(GPU)
    return JointRanks(dist.FileStore(str(folder / name), 3), rank, 1, 2, BOUND, GPU)


def filled(value: int) -> torch.Tensor:
    return torch.full((NBYTES,), value, dtype=torch.uint8, device=GPU)


def what_runs_beside_broadcasts(rank: int, folder: Path) -> bool:
    """Rank 0 begins two to which the others come late; whether neither it nor its own stream waits for them."""
    ranks = joint(rank, folder, "beside")
    ranks.broadcast(filled(1), 0).wait()  # connects them
    memory = [torch.full((LARGE,), rank + number, dtype=torch.uint8, device=GPU) for number in range(2)]
    torch.cuda.synchronize()
    ranks.gather(None)
    if rank:
        time.sleep(LATE)
    started = time.monotonic()
    arrival = partial(arrived, [ranks.broadcast(each, 0) for each in memory], BOUND, GPU)
    own = torch.cuda.Event()
    filled(7)
    own.record()
    own.synchronize()
    free = time.monotonic() - started < LATE / 2 and not arrival()
    while not arrival():
        time.sleep(1e-3)
    assert [each.unique().tolist() for each in memory] == [[0], [1]]
    ranks.gather(None)
    ranks.close()
    return free


def the_last_dies(rank: int, folder: Path, when: str) -> tuple[str, float]:
    """Its bytes are waited for in NCCL, which is connecting the ranks; the next group does without it."""
    ranks = joint(rank, folder, "dying")
    if when in ("connected", "broadcasting"):
        under_way = ranks.broadcast(filled(1), 0)
    if when == "connected":
        under_way.wait()
        torch.cuda.synchronize()
    ranks.gather(None)  # nobody is still connecting by gloo
    if rank == 2:
        os._exit(9)
    time.sleep(1)
    started, text = time.monotonic(), "no error"
    try:
        if when == "before broadcast":
            ranks.broadcast(filled(1), 0)
        else:
            works, end = [ranks.broadcast(filled(2), 2)], time.monotonic() + BOUND
            while not arrived(works, BOUND, GPU) and time.monotonic() < end:
                time.sleep(1e-2)
            text = "nothing has come"
    except RuntimeError as error:
        text = str(error)
    ranks.close()
    seconds = time.monotonic() - started
    ranks = JointRanks(dist.FileStore(str(folder / "next"), 2), rank, 1, 1, BOUND, GPU)
    memory = [filled(rank)]
    ranks.broadcast(memory[0], 0).wait()
    assert torch.equal(memory[0], filled(0)), "the next group is whole"
    ranks.gather(None)
    return text, seconds


def test_a_rank_goes_on_while_its_bytes_are_on_their_way(tmp_path: Path) -> None:
    """So the next bucket is packed meanwhile."""
    assert play(3, what_runs_beside_broadcasts, tmp_path, seconds=SECONDS)[0] is True


@pytest.mark.parametrize("when", ["before broadcast", "connected", "broadcasting"])
def test_a_member_that_dies_before_the_first_bytes_is_waited_for_within_the_bound(when: str, tmp_path: Path) -> None:
    *left, dead = play(3, the_last_dies, tmp_path, when, seconds=SECONDS)
    assert dead is None
    for said in left:
        assert isinstance(said, tuple), said
        assert said[0] != "no error" and said[1] < BOUND + 5, said
