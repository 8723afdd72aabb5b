# SPDX-License-Identifier: Apache-2.0
"""Factors laid into one buffer per rank come out whole, however they were cut."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Base, View
from verl_sync_plugin.trainers.lora import FactorStore

CPU = torch.device("cpu")


class Done(dist.Work):
    """A collective that has come to its end."""

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        assert timeout == timedelta(seconds=30), "waited for without the bound"
        return True


def stores_of(wholes: dict[str, torch.Tensor], cuts: dict[str, list[int]], world: int) -> list[FactorStore]:
    """What each rank keeps."""
    stores = [FactorStore(CPU, 30.0) for _ in range(world)]
    for key, whole in wholes.items():
        bounds = [0, *sorted(cuts[key]), whole.numel()]
        runs = [whole.reshape(-1)[low:high] for low, high in pairwise(bounds)]
        view = View(key, tuple(whole.shape), 0, whole.numel())
        base = Base(key, str(whole.dtype)[6:], whole.itemsize, tuple(run.numel() for run in runs), (view,))
        for store, run in zip(stores, runs, strict=True):
            store.keep(key, Shard(base, run.clone))
    return stores


def gathered(
    stores: list[FactorStore], keys: tuple[str, ...], dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, torch.Tensor], int]:
    """What the last rank gets, and after how many collectives."""
    sent: list[list[torch.Tensor]] = []

    def all_gather(found: torch.Tensor, mine: torch.Tensor, group: object, async_op: bool) -> dist.Work:
        place = len(sent[-1])
        sent[-1].append(mine)
        if len(sent) == len(stores):
            found.copy_(torch.cat([parts[place] for parts in sent]))
        assert async_op
        return Done()

    monkeypatch.setattr("torch.distributed.all_gather_into_tensor", all_gather)
    found: dict[str, torch.Tensor] = {}
    for rank, store in enumerate(stores):
        monkeypatch.setattr("torch.distributed.get_rank", lambda group, rank=rank: rank)
        sent.append([])
        work, steps = store.gather(keys, None, dtype), 0
        while True:
            try:
                next(work)
                steps += 1
            except StopIteration as end:
                found = end.value
                break
        assert steps == len(sent[-1]), "a collective without a yield before it"
    return found, len(sent[-1])


@given(data=st.data())
def test_any_cut_comes_back_whole(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 4), label="world")
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4))
    wholes = {f"factor {i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    cuts = {
        key: data.draw(st.lists(st.integers(0, whole.numel()), min_size=world - 1, max_size=world - 1))
        for key, whole in wholes.items()
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        found, collectives = gathered(stores_of(wholes, cuts, world), tuple(wholes), None, monkeypatch)
    assert collectives == (world > 1)
    assert list(found) == list(wholes)
    assert all(torch.equal(found[key], wholes[key]) for key in wholes)
