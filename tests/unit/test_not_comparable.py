# SPDX-License-Identifier: Apache-2.0
"""Tensors that cannot be compared in the engine's parameters: which these are, for how long, and who is told."""

from __future__ import annotations

import pytest
import torch
from receiving import Pair, Receiver, Weights

from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Base, View
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.ranks import Alone
from verl_sync_plugin.verify.destination import DestinationCheck
from verl_sync_plugin.verify.narrowed import made_on_the_way


class Crowded(Pair):
    """Its device is full when it is given marks for the first time."""

    full = True

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            if not tensor.is_meta and self.full:
                self.full = False
                raise torch.OutOfMemoryError("CUDA out of memory")
            getattr(self, name).data.copy_(tensor)


def test_too_little_memory_for_marks_costs_the_proof_of_that_sync_alone() -> None:
    receiver = Receiver(Crowded())
    receiver.sync(1.0, 2.0)
    proven = receiver.proof.proven(always=True)
    assert proven.placed == () and "no device memory for a load of marks" in dict(proven.left_out)["a"]
    receiver.sync(3.0, 4.0)
    proven = receiver.proof.proven(always=False)
    assert proven.left_out == () and proven.placed, "what is held now has to be told"


@pytest.mark.parametrize("verify", ["always", 10])
def test_syncs_of_which_nothing_can_be_compared_are_not_called_verified(verify: str | int) -> None:
    check = DestinationCheck(Agreement(10.0, ranks=Alone()))
    check.left_out = {"a": "its load lays parameters out anew"}
    with pytest.raises(SyncError, match=rf"verify={verify}, and nothing .* compared: a \(its load lays"):
        check.refuse_nothing(verify)
    check.refuse_nothing("first")
    check.compared = (0,)
    check.refuse_nothing(verify)


def test_every_reason_is_said_however_many_tensors_have_another(capsys: pytest.CaptureFixture[str]) -> None:
    check = DestinationCheck(Agreement(10.0, ranks=Alone()))
    check.left_out = {**{f"norm{number}": "is computed" for number in range(9)}, "odd": "lies elsewhere"}
    check._say({})
    told = capsys.readouterr()
    said = told.out + told.err
    assert "norm4 and 4 more (is computed)" in said and "not comparable: odd (lies elsewhere)" in said


def test_only_what_is_merged_cannot_be_rounded_once_more() -> None:
    def base(name: str, dtype: str) -> Base:
        return Base(name, dtype, 4 if dtype == "float32" else 2, (64,), (View(name, (64,), 0, 64),))

    bases = (base("router", "float32"), base("adapted", "float32"), base("norm", "bfloat16"))
    shards = [Shard(each, lambda: torch.zeros(64)) for each in bases]
    shards[1].merge = lambda part, begin: part
    plan = plan_buckets(bases, 1 << 20, False)
    assert made_on_the_way(plan, 0, shards, all_of_them=False) == {1}
    assert made_on_the_way(plan, 0, shards, all_of_them=True) == {0, 1}
    assert made_on_the_way(plan, 0, [], all_of_them=True) == frozenset(), "who packs nothing makes nothing"
