# SPDX-License-Identifier: Apache-2.0
"""The assembler: whole tensors out of buckets whose slot is overwritten as soon as a bucket has been loaded."""

from __future__ import annotations

import pytest
import torch
from verl.workers.rollout.sglang_rollout.utils import DEEPSEEK_V4_FUSION_GROUPS

from verl_sync_plugin.copies.copier import BucketMemory
from verl_sync_plugin.engine.load import Assembler
from verl_sync_plugin.engine.model import partner_of
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Base, Entry, View
from verl_sync_plugin.rollouts.sglang.model import FUSED_PAIRS

Loads = list[list[tuple[str, torch.Tensor]]]


def base_of(name: str, tensor: torch.Tensor, views: tuple[View, ...] = (), world: int = 2) -> Base:
    """A tensor cut over ranks, the first one holding the larger part."""
    shares = [tensor.numel() // world] * world
    shares[0] += tensor.numel() - sum(shares)
    views = views or (View(name, tuple(tensor.shape), 0, tensor.numel()),)
    return Base(name, str(tensor.dtype).removeprefix("torch."), tensor.element_size(), tuple(shares), views)


def ship(tensors: list[torch.Tensor], bases: list[Base], bucket_bytes: int, assembler: Assembler) -> Loads:
    """Sends all buckets through one slot; returns what each load call got, cloned while it was valid."""
    plan = plan_buckets(tuple(bases), bucket_bytes)
    memory = torch.zeros(plan.slot_bytes, dtype=torch.uint8)
    loads: Loads = []
    for bucket in plan.buckets:
        for rank in range(bucket.world):
            for part in bucket.slices:
                base, flat = bases[part.base], tensors[part.base].reshape(-1)
                first = sum(base.lengths[:rank])
                run = flat[first + part.begin : first + min(part.end, base.lengths[rank])].view(torch.uint8)
                memory.narrow(0, rank * bucket.stride + part.offset, run.numel()).copy_(run)
        arriving = assembler.tensors(BucketMemory([memory], bucket.stride, bucket.world), bucket.entries)
        loads.append([(name, tensor.clone()) for name, tensor in arriving])
        memory.fill_(0xEE)
    return loads


def arrived(loads: Loads) -> dict[str, torch.Tensor]:
    """All tensors of all loads; none may come twice."""
    names = [name for load in loads for name, _ in load]
    assert len(names) == len(set(names))
    return {name: tensor for load in loads for name, tensor in load}


def test_the_pairs_of_deepseek_v4_are_those_that_verl_keeps_together() -> None:
    for one, other in DEEPSEEK_V4_FUSION_GROUPS:
        names = f"model.layers.0{one}", f"model.layers.0{other}"
        assert tuple(partner_of(name, FUSED_PAIRS) for name in names) == names[::-1]


@pytest.mark.parametrize("pair", FUSED_PAIRS)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("world", [1, 2])  # with one rank the first half aliases the slot, with two it is joined
def test_torn_pair_arrives_in_one_load(pair: tuple[str, str], swapped: bool, world: int) -> None:
    names = [f"model.layers.3.self_attn.{suffix}" for suffix in (reversed(pair) if swapped else pair)]
    ordered = [names[0], "model.between", names[1], "model.after"]
    tensors = [torch.randn(8, 4) for _ in ordered]
    assembler = Assembler(pairs=FUSED_PAIRS)
    bases = [base_of(n, t, world=world) for n, t in zip(ordered, tensors, strict=True)]
    loads = ship(tensors, bases, 128, assembler)
    assembler.finish()
    assert [[name for name, _ in load] for load in loads] == [[], ["model.between"], names, ["model.after"]]
    got = arrived(loads)
    assert all(torch.equal(got[name], tensor) for name, tensor in zip(ordered, tensors, strict=True))


def test_pairs_of_different_layers_do_not_mix() -> None:
    first, second = FUSED_PAIRS[0]
    ordered = [f"layers.0.{first}", f"layers.1.{first}", f"layers.1.{second}", f"layers.0.{second}"]
    tensors = [torch.randn(8, 4) for _ in ordered]
    loads = ship(
        tensors, [base_of(n, t) for n, t in zip(ordered, tensors, strict=True)], 128, Assembler(pairs=FUSED_PAIRS)
    )
    assert [[name for name, _ in load] for load in loads] == [[], [], ordered[1:3], [ordered[0], ordered[3]]]


def test_finish_names_an_incomplete_tensor() -> None:
    assembler = Assembler()
    memory = BucketMemory([torch.zeros(16, dtype=torch.uint8)], 16, 1)
    assert list(assembler.tensors(memory, (Entry("half", "uint8", (32,), None, 32, (Run(0, 0, 16),)),))) == []
    with pytest.raises(ValueError, match="incomplete tensors: half"):
        assembler.finish()


def test_what_a_model_does_to_a_tensor_stays_away_from_other_readers() -> None:
    """SGLang's Gemma adds 1 to norms where they arrive, and its gpt-oss writes zeros; both ranks read this slot."""
    whole = torch.arange(8, dtype=torch.float32)
    base = Base("norm.weight", "float32", 4, (0, 8), (View("norm.weight", (8,), 0, 8),))
    (bucket,) = plan_buckets((base,), 1 << 10, sharded=True).buckets
    slots = [torch.zeros(bucket.stride, dtype=torch.uint8) for _ in range(2)]
    slots[1][:32] = whole.view(torch.uint8)
    for _ in range(2):
        memory = BucketMemory(slots, bucket.stride, bucket.world)
        ((_, tensor),) = Assembler().tensors(memory, bucket.entries)
        assert torch.equal(tensor, whole)
        tensor += 1
