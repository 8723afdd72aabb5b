# SPDX-License-Identifier: Apache-2.0
"""Loads of all kinds, however tensors are cut: exact, and with hashes that are those of what was packed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
import torch
from receiving import Engine

from verl_sync_plugin.copies.packing import Packer
from verl_sync_plugin.engine.load import LayoutKey, ModelLoad
from verl_sync_plugin.layout.load_map import held_parts, owners_of, read_parts, weigh
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Base, Entry, Shard, View
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
        self.packers = [Packer(CPU, self.plan, rank, True, False) for rank in range(self.world)]
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


class Columns(torch.nn.Module):
    """Takes some columns of a tall matrix."""

    def __init__(self, taken: slice | None) -> None:
        super().__init__()
        self.taken = taken
        shape = (4096, 64 if taken is None else 32)
        self.w = torch.nn.Parameter(torch.zeros(shape, dtype=BF16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.w.data.copy_(tensor if self.taken is None else tensor[:, self.taken])


@pytest.mark.parametrize(("rows", "scratch"), [(4096, False), (8192, True)])
def test_columns_of_a_tall_matrix_are_not_scattered(rows: int, scratch: bool) -> None:
    """Half the columns of 4096 rows, to an engine rank that takes half or all of them; crosswise they are."""
    piece = Run(0, 0, 64, 4096, 64, 128) if rows == 4096 else Run(0, 0, 32, 8192, 32, 64)
    entry = Entry("w", "bfloat16", (4096, 64), None, 4096 * 128, (piece,))
    manifest = Manifest(((entry,),), (1,), (1 << 20,))
    load = ModelLoad(Engine(Columns(slice(32, 64)), 0), manifest, CPU)
    load.begin()
    assert ("w" in load._by_scratch) is scratch


def test_a_module_that_was_replaced_is_a_new_layout() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    key = LayoutKey(Engine(model, 0), frozenset({"0.bias"}))
    before = key.now()
    model[0].bias.data = model[0].bias.data.clone()
    assert key.now() == before, "every load may lay it out otherwise"
    model[1] = torch.nn.Linear(4, 4)
    now = key.now()
    assert now != before and model[1].weight.data_ptr() in {entry[0] for entry in now[1:]}
    assert key.now() == now
