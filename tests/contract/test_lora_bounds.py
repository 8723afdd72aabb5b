# SPDX-License-Identifier: Apache-2.0
"""A rank that does not take part in gathering factors or adding up norms is waited for no longer than T, whatever the
process group's own timeout is."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from lora_models import Layout, Variant, merging_source, peft_model, shard
from torch.distributed import distributed_c10d
from worlds import run_world, stop

SECONDS = 5.0
DORA = Variant("dora", config={"target_modules": ["q_proj"], "use_dora": True})


def all_are_here(where: str) -> None:
    """One rank may be seconds slower than the other up to here, which is not what is tested. By the store: what goes
    over the group may be lost with it, when the other rank's wait ends."""
    store = distributed_c10d._get_default_store()
    store.set(f"{where} {dist.get_rank()}", "")
    store.wait([f"{where} {rank}" for rank in range(dist.get_world_size())])


def absent_after(collectives: int) -> float:
    """Rank 1 leaves after so many collectives; returns how long rank 0 waited for it in the next."""
    source = merging_source(shard(peft_model(DORA), Layout((2,))), "qwen2", timeout_seconds=SECONDS)
    every = tuple(range(len(source.shards())))
    work = source.prepare(every)
    for number in range(collectives + 1):
        next(work)  # right before a collective
        all_are_here(f"collective {number}")
    started = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            next(work, None)
    else:
        time.sleep(SECONDS + 2)
    return time.monotonic() - started


@pytest.mark.parametrize("collectives", [0, 1], ids=["factors", "norms"])
def test_an_absent_rank_is_waited_for_no_longer_than_the_bound(collectives: int) -> None:
    stop()  # fresh processes: behind many other tests, one of these did not get what the other had gathered
    waited, _ = run_world(2, absent_after, collectives, timeout=60)
    assert SECONDS * 0.5 < waited < SECONDS + 1, waited
