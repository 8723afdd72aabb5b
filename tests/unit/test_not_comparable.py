# SPDX-License-Identifier: Apache-2.0
"""Tensors that cannot be compared in the engine's parameters: which these are, for how long, and who is told."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from receiving import Pair, Receiver, Weights

from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Base, View
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.proof import Proven
from verl_sync_plugin.transport.ranks import Alone
from verl_sync_plugin.verify.cadence import MOST_TRIES, Cadence
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
    assert proven.no_room == dict(proven.left_out)["a"]
    receiver.sync(3.0, 4.0)
    proven = receiver.proof.proven(always=False)
    assert proven.left_out == () and proven.placed and not proven.no_room, "what is held now has to be told"


def _one_of_two(rank: int, port: int) -> None:
    """Two engines of one rank each; the second's device is full in the first sync. Entry of a spawned process."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    receiver, check = Receiver(Crowded() if rank else Pair()), DestinationCheck(Agreement(30.0))
    receiver.sync(1.0, 2.0)
    check.learn(receiver.plan, _told(check, receiver))
    assert check.compared == () and set(check.left_out) == {"a", "b"}
    with pytest.raises(SyncError, match=r"always, and not every engine rank .*beside rank 1: no device memory .*Lower"):
        check.refuse_unproven("always")
    check.refuse_unproven("first")
    receiver.sync(3.0, 4.0)
    check.learn(receiver.plan, _told(check, receiver))
    assert check.compared == (0, 1) and not check.left_out and not check.no_room
    check.refuse_unproven("always")
    dist.barrier()  # the first rank keeps the store
    dist.destroy_process_group()


def _told(check: DestinationCheck, receiver: Receiver) -> Proven:
    proven = receiver.proof.proven(always=False)
    receiver.proof.told(proven)
    check.note(proven, receiver.plan)
    return proven


def test_a_tensor_that_one_engine_rank_could_not_look_for_is_not_called_compared() -> None:
    """The other engine covers every byte of it, and yet says nothing of this one's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_one_of_two, args=(port,), nprocs=2)


def test_syncs_without_room_for_the_proof_do_not_use_up_the_first_ones() -> None:
    cadence = Cadence("first")
    for _ in range(MOST_TRIES):
        cadence.note("plan", whole=False)
    assert cadence.due("plan"), "none of them was verified"
    for whole in (True, False, True):  # no more tries are given, since each costs a load of marks
        assert cadence.due("plan")
        cadence.note("plan", whole)
    assert not cadence.due("plan")


@pytest.mark.parametrize("verify", ["always", 10])
def test_syncs_of_which_nothing_can_be_compared_are_not_called_verified(verify: str | int) -> None:
    check = DestinationCheck(Agreement(10.0, ranks=Alone()))
    check.left_out = {"a": "its load lays parameters out anew"}
    with pytest.raises(SyncError, match=rf"verify={verify}, and nothing .* compared: a \(its load lays"):
        check.refuse_unproven(verify)
    check.refuse_unproven("first")
    check.compared = (0,)
    check.refuse_unproven(verify)


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
