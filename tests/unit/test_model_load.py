# SPDX-License-Identifier: Apache-2.0
"""Loads of all kinds, however tensors are cut: exact, and with hashes that are those of what was packed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
import torch
from receiving import Engine
from verl.workers.rollout.sglang_rollout.utils import DEEPSEEK_V4_FUSION_GROUPS

from verl_sync_plugin.copies.copier import BucketMemory
from verl_sync_plugin.copies.packing import Packer
from verl_sync_plugin.engine.load import Assembler, ModelLoad
from verl_sync_plugin.engine.model import partner_of
from verl_sync_plugin.layout.load_map import held_parts, owners_of, read_parts, weigh
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Base, Entry, Shard, View
from verl_sync_plugin.rollouts.sglang.model import FUSED_PAIRS
from verl_sync_plugin.transport.protocol import Manifest

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
ROWS, COLUMNS = 24, 40
Load = Callable[[torch.Tensor, torch.Tensor], object]
LOADS: dict[str, tuple[tuple[int, ...], torch.dtype, Load]] = {
    "columns": ((ROWS, COLUMNS // 2), BF16, lambda p, t: p.copy_(t[:, : COLUMNS // 2])),
    "computed": ((ROWS, COLUMNS), BF16, lambda p, t: p.copy_(t + 1)),
    "interleaved": ((ROWS, 2 * COLUMNS), BF16, lambda p, t: (p.fill_(5), p[:, ::2].copy_(t))),
    "padded": ((ROWS + 8, COLUMNS), BF16, lambda p, t: (p[:ROWS].copy_(t), p[ROWS:].fill_(-0.0))),
    "rows": ((ROWS // 2, COLUMNS), BF16, lambda p, t: p.copy_(t[ROWS // 2 :])),
    "transposed": ((COLUMNS, ROWS), BF16, lambda p, t: p.copy_(t.t())),
    "turned": ((ROWS, COLUMNS // 4, 4), BF16, lambda p, t: p.copy_(t.view(ROWS, 4, COLUMNS // 4).transpose(1, 2))),
    "whole": ((ROWS, COLUMNS), BF16, lambda p, t: p.copy_(t)),
    "wide": ((ROWS, COLUMNS), FP32, lambda p, t: p.copy_(t)),
}
SCRATCH = {"interleaved", "transposed", "turned", "wide"}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, (shape, dtype, _) in LOADS.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            LOADS[name][2](getattr(self, name).data, tensor)


class Sender:
    def __init__(self, seed: int, bucket_bytes: int, tied: bool) -> None:
        rng = random.Random(seed)
        self.bases, self.world = [], 3
        names = [(name,) for name in LOADS if not tied or name not in ("rows", "whole")] + [("whole", "rows")] * tied
        for each in names:
            cut = sorted(rng.randint(0, ROWS * COLUMNS) for _ in range(self.world - 1))
            lengths = tuple(b - a for a, b in zip([0, *cut], [*cut, ROWS * COLUMNS], strict=True))
            views = tuple(View(name, (ROWS, COLUMNS), 0, ROWS * COLUMNS) for name in each)
            self.bases.append(Base(each[0], "bfloat16", 2, lengths, views))
        self.plan = plan_buckets(tuple(self.bases), bucket_bytes, True)
        self.packers = [Packer(CPU, self.plan, rank) for rank in range(self.world)]
        self.manifest = Manifest.of(self.plan)

    def send(self, load: ModelLoad, seed: int) -> dict[str, torch.Tensor]:
        generator, shards, sent = torch.Generator().manual_seed(seed), [list[Shard]() for _ in range(self.world)], {}
        for base in self.bases:
            value = torch.randn(ROWS, COLUMNS, generator=generator).bfloat16()
            sent |= {view.name: value for view in base.views}
            for rank in range(self.world):
                run = value.view(-1)[sum(base.lengths[:rank]) :][: base.lengths[rank]]
                shards[rank].append(Shard(base, lambda run=run: run))  # type: ignore[misc]
        load.begin()
        slots = [torch.zeros(self.plan.slot_bytes, dtype=torch.uint8) for _ in range(self.world)]
        for packer in self.packers:
            packer.begin()
        for index in range(len(self.plan.buckets)):
            for rank, packer in enumerate(self.packers):
                packer.pack(index, slots[rank], shards[rank])
            load.load(index, slots)
            for slot in slots:
                slot.fill_(0xEE)  # used again
        load.finish()
        return sent

    @property
    def sums(self) -> list[int]:
        return list(sum(packer.sums() for packer in self.packers).tolist())  # type: ignore[attr-defined]


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 3000, 600])
@pytest.mark.parametrize("seed", range(4))
def test_what_arrives_is_what_the_model_would_load(seed: int, bucket_bytes: int, tied: bool) -> None:
    model, reference, sender = Model(), Model(), Sender(seed, bucket_bytes, tied)
    load = ModelLoad(Engine(model, 0), sender.manifest, CPU)
    for number in range(3):
        for parameter in model.parameters():
            parameter.view(torch.uint8).fill_(0xA5)  # what memory holds that was released
        sent = sender.send(load, number)
        reference.load_weights(sent.items())
        for name, parameter in reference.named_parameters():
            assert torch.equal(getattr(model, name).view(torch.uint8), parameter.view(torch.uint8)), name
        assert_hashes(load, sender)
    assert [left.tensor for left in load.map.left] == [sorted(LOADS).index("computed")]
    assert load._by_scratch >= SCRATCH and "itself" in load.obstacle


def assert_hashes(load: ModelLoad, sender: Sender) -> None:
    """Every part that makes up a whole tensor has its hash."""
    buckets, names = load.manifest.buckets, sorted(LOADS)
    owners, numels = owners_of(buckets), [ROWS * COLUMNS] * len(names)
    read = read_parts(load.map, buckets, owners)
    held = [(number, move.box) for number, move in held_parts(load.map, ["bfloat16"] * len(names), owners)]
    for parts, found in ((read, load.sums()), (held, load.held().sums)):
        times, (factors,) = weigh(numels, [parts])
        total = [0] * len(names)
        for (number, _), factor, value in zip(parts, factors, memoryview(found).cast("q"), strict=True):
            total[number] += factor * value
        compared = {names[number] for number, many in enumerate(times) if many > 0}
        assert compared >= {"interleaved", "padded", "transposed", "turned", "wide"}
        for number, many in enumerate(times):
            if many > 0:
                assert (total[number] - many * sender.sums[number]) % (1 << 64) == 0, names[number]


# The assembler: whole tensors out of buckets whose slot is overwritten as soon as a bucket has been loaded


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
