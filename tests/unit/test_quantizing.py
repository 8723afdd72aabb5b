# SPDX-License-Identifier: Apache-2.0
"""Compares the kernel's fp8 with verl's byte for byte; in Triton's interpreter, which cuts, they may be neighbours."""

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from receiving import WORLD, Tensors, Weights

from verl_sync_plugin.copies.copier import BucketMemory
from verl_sync_plugin.copies.packing import Packer
from verl_sync_plugin.copies.table import QuantizeTable
from verl_sync_plugin.engine.load import Assembler, ModelLoad
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import SCALE_SUFFIX, Base, Plan, Shard, View
from verl_sync_plugin.rollouts.sglang.model import SGLangModel
from verl_sync_plugin.trainers import fp8
from verl_sync_plugin.trainers.base import ParameterSource, WirePolicy
from verl_sync_plugin.transport import memory
from verl_sync_plugin.transport.memory import ParameterLocator, Region
from verl_sync_plugin.transport.protocol import Manifest

SHAPES = {"even": (256, 256), "uneven": (150, 300), "small": (5, 130), "wide": (1, 700), "zero": (128, 128)}


class Whole(ParameterSource):
    """Matrices that one rank holds whole, always in the same tensors."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        views = ((View(name, (*tensor.shape,), 0, tensor.numel()), tensor) for name, tensor in state.items())
        bases = ((Base(view.name, "bfloat16", 2, (view.span,), (view,)), tensor) for view, tensor in views)
        self.kept: list[Shard] = [Shard(base, partial(tensor.view, -1), run=tensor) for base, tensor in bases]

    def shards(self) -> list[Shard]:
        return self.kept


@pytest.mark.parametrize(("dtype", "bucket_bytes"), [(torch.bfloat16, 64 << 20), (torch.float32, 6_016)])
def test_a_matrix_is_quantized_as_by_verl(
    dtype: torch.dtype, bucket_bytes: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.utils.kernel import fp8_kernel

    monkeypatch.setattr(fp8, "kernel_works", lambda device: True)
    torch.manual_seed(0)
    place, on_a_gpu = torch.device(device), device != "cpu"
    drawn = {name: torch.randn(shape) * torch.logspace(-6, 3, shape[1]) for name, shape in SHAPES.items()}
    state = {name: (t if on_a_gpu else t.bfloat16()).to(place, dtype) for name, t in drawn.items()}
    state["zero"].zero_()
    blocks = dict.fromkeys(state, (128, 128))
    source = fp8.QuantizingSource(Whole(state), WirePolicy(torch.bfloat16, blocks=blocks), place, 30.0)
    shards = source.shards()
    plan = plan_buckets(tuple(shard.base for shard in shards), bucket_bytes)
    packer, assembler, got = Packer(place, plan, 0), Assembler(frozenset(plan.names)), dict[str, torch.Tensor]()
    for each in range(2):  # the second with other weights elsewhere, and what was kept of the first
        packer.begin()
        for index, bucket in enumerate(plan.buckets):
            with mock.patch.object(source, "_measure", side_effect=AssertionError("the kernel measures")):
                list(source.prepare(bucket.bases))
            slot = torch.full((plan.slot_bytes,), 0xEE, dtype=torch.uint8, device=device)
            packer.pack(index, slot, shards)
            got |= {n: t.clone() for n, t in assembler.tensors(BucketMemory([slot], bucket.stride, 1), bucket.entries)}
        assert not packer.broken()
        for name, weight in state.items():
            values, scales = fp8_kernel.scaled_fp8_blockwise(weight.bfloat16(), [128, 128])
            assert torch.equal(got[f"{name}_scale_inv"], scales.view_as(got[f"{name}_scale_inv"])), (name, each)
            apart = (got[name].view(torch.int8).int() - values.view(torch.int8).int()).abs().max()
            assert apart <= (0 if on_a_gpu else 1), (name, each)
            weight.data = (weight * -1.7).to(weight.dtype if on_a_gpu else torch.bfloat16).to(dtype)
        shards = source.shards()
    state["even"][-1, -1] = torch.nan
    shards = source.shards()
    packer.begin()
    for index, bucket in enumerate(plan.buckets):
        list(source.prepare(bucket.bases))
        packer.pack(index, torch.empty(plan.slot_bytes, dtype=torch.uint8, device=device), shards)
    assert "even_scale_inv" in packer.broken()


SIZE = 128
CUT = {"rows": (384, 256), "columns": (256, 512), "gate": (128, 256), "up": (128, 256), "uneven": (200, 360)}
ROWS, EACH = 256, 128  # of "sides", of which every rank holds some columns


class Cut(ParameterSource):
    """Holds one of three ranks' parts of matrices: rows that end where a block does, or anywhere, and columns."""

    def __init__(self, rank: int, device: torch.device, torn: bool) -> None:
        self.group: Any = SimpleNamespace(rank=rank)
        self.edges = {name: [0, SIZE * c, r * c, r * c] for name, (r, c) in CUT.items()}
        if torn:
            self.edges = {name: [0, r * c // 3 + 5, r * c // 2 + 30, r * c] for name, (r, c) in CUT.items()}
        ends = {name: edges[rank : rank + 2] for name, edges in self.edges.items()}
        dtype = [torch.bfloat16, torch.float32, torch.bfloat16][rank]
        self.runs = {name: torch.zeros(end - begin, dtype=dtype, device=device) for name, (begin, end) in ends.items()}
        self.side = torch.zeros(ROWS, EACH, dtype=dtype, device=device)

    def shards(self) -> list[Shard]:
        found = []
        for name, run in self.runs.items():
            lengths = tuple(b - a for a, b in itertools.pairwise(self.edges[name]))
            view = View(name, CUT[name], 0, sum(lengths))
            found.append(Shard(Base(name, "bfloat16", 2, lengths, (view,)), partial(run.view, -1), run=run))
        for rank in range(WORLD):
            shares = (Run(0, EACH * rank, EACH, ROWS, EACH, EACH * WORLD),)
            view = View("sides", (ROWS, EACH * WORLD), 0, ROWS * EACH * WORLD, None, shares)
            base = Base(f"side {rank}", "bfloat16", 2, tuple(ROWS * EACH * (r == rank) for r in range(WORLD)), (view,))
            own = self.side if rank == self.group.rank else self.side[:0]
            found.append(Shard(base, partial(own.view, -1), run=own))
        return found

    def train(self, weights: Tensors) -> None:
        rank = self.group.rank
        for name, run in self.runs.items():
            begin, end = self.edges[name][rank : rank + 2]
            run.copy_(weights[name].view(-1)[begin:end])
        self.side.copy_(weights["sides"][:, EACH * rank :][:, :EACH])


class Rank(torch.nn.Module):
    """A tensor-parallel rank: some rows, some columns, two matrices in one parameter, and one whole."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        shapes = {**dict.fromkeys(("rows", "columns", "both", "sides"), (256, 256)), "uneven": (200, 360)}
        for name, (rows, columns) in shapes.items():
            scales = torch.zeros(-(-rows // SIZE), -(-columns // SIZE), device=device)
            values = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn, device=device)
            for key, tensor in ((name, values), (name + SCALE_SUFFIX, scales)):
                self.register_parameter(key, torch.nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            matrix, unit = name.removesuffix(SCALE_SUFFIX), 1 if name.endswith(SCALE_SUFFIX) else SIZE
            end = SCALE_SUFFIX if unit == 1 else ""
            parameter = getattr(self, ("both" if matrix in ("gate", "up") else matrix) + end).data
            if matrix == "rows":
                parameter.copy_(tensor[unit:])
            elif matrix in ("columns", "sides"):
                parameter.copy_(tensor[:, unit : 3 * unit])
            elif matrix == "uneven":
                parameter.copy_(tensor)
            else:
                parameter[unit if matrix == "up" else 0 :][:unit].copy_(tensor)


class InFp8(SGLangModel):
    fp8_block = (SIZE, SIZE)  # type: ignore[assignment]


class OwnMemory:
    """Memory that the reader has by its owner's addresses, because it is the same process."""

    def find(self, run: torch.Tensor) -> tuple[int, int]:
        return run.data_ptr() // 512 * 512, run.data_ptr() % 512

    def identities(self, allocations: tuple[int, ...]) -> object:
        return allocations

    def export(self, allocation: int) -> Region:
        return Region("own", str(allocation), 1 << 20, b"")

    def flat(self, region: Region) -> Any:
        return SimpleNamespace(data_ptr=lambda: int(region.key))


def prepare(sources: list[fp8.QuantizingSource], bases: tuple[int, ...]) -> None:
    """Has all ranks find the scales; each hears of the largest magnitudes of the others."""
    ready = [source.prepare(bases) for source in sources]
    for each in ready:
        next(each, None)

    def all_reduce(largest: torch.Tensor, *_: object, **__: object) -> Any:
        largest.copy_(torch.stack([source._largest for source in sources]).amax(0)[: len(largest)])
        return SimpleNamespace(wait=lambda *_: True)

    with mock.patch.object(torch.distributed, "all_reduce", all_reduce):
        for each in ready:
            next(each, None)


@pytest.mark.parametrize(("bucket_bytes", "torn"), [(400_000, True), (8 << 20, False)])
@torch.no_grad()
def test_engine_ranks_quantize_too(bucket_bytes: int, torn: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes and the same hashes as where trainer ranks quantize what they pack."""
    monkeypatch.setattr(fp8, "kernel_works", lambda device: True)
    monkeypatch.setattr(ParameterSource, "rank", property(lambda source: source.group.rank if source.group else 0))
    for exporter in ("CudaExporter", "SharedFileExporter"):
        monkeypatch.setattr(memory, exporter, OwnMemory)
    place = torch.device(device)
    inner = [Cut(rank, place, torn) for rank in range(WORLD)]
    policy = WirePolicy(torch.bfloat16, blocks=dict.fromkeys([*CUT, "sides"], (SIZE, SIZE)))
    sources = [fp8.QuantizingSource(each, policy, place, 30.0) for each in inner]
    plan: Plan = plan_buckets(tuple(shard.base for shard in sources[0].shards()), bucket_bytes, True)
    packers = [Packer(place, plan, rank) for rank in range(WORLD)]
    parameters = [ParameterLocator(place, plan, rank) for rank in range(WORLD)]
    models = [Rank(place), Rank(place)]
    staged, direct = (ModelLoad(InFp8(model, 0), Manifest.of(plan), place) for model in models)
    every = tuple(range(len(plan.bases)))
    for seed in range(2):  # the second with the tables of the first
        generator = torch.Generator().manual_seed(seed)
        shapes = CUT | {"sides": (ROWS, EACH * WORLD)}
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        weights = {name: (each * torch.logspace(-3, 3, each.shape[1])).bfloat16() for name, each in drawn.items()}
        for each in inner:
            each.train(weights)
        shards = [source.shards() for source in sources]
        assert all(source.readable_in_place for source in sources)
        found = [mine.locate(some) for mine, some in zip(parameters, shards, strict=True)]
        prepare(sources, every)
        sums = list[Tensors]()
        for load, packs in ((staged, True), (direct, False)):
            for parameter in load._model.module.parameters():
                parameter.view(torch.uint8).fill_(0xA5)
            load.begin()
            assert not load.obstacle and not load.map.not_copied
            slots = [torch.zeros(plan.slot_bytes, dtype=torch.uint8, device=place) for _ in range(WORLD)]
            for packer, mine, some in zip(packers, parameters, shards, strict=True):
                packer.begin()
                if not packs:
                    packer.hash_parameters(some, mine.found)
            for index in range(len(plan.buckets) if packs else 0):
                for packer, slot, some in zip(packers, slots, shards, strict=True):
                    packer.pack(index, slot, some)
                load.load(index, slots)
            if not packs:
                load.load_in_place(found, 1, OwnMemory())  # type: ignore[arg-type]
            load.finish()
            sums.append({"packed": torch.stack([packer.sums() for packer in packers]).sum(0)})
            sums[-1] |= {
                "read": torch.frombuffer(bytearray(load.sums()), dtype=torch.int64),
                "held": torch.frombuffer(bytearray(load.held().sums), dtype=torch.int64),
            }
        for key, of_staged in sums[0].items():
            assert torch.equal(of_staged, sums[1][key]), (key, seed)
        for (name, one), (_, other) in zip(*(model.named_parameters() for model in models), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (name, seed)
    direct.begin()
    models[1].rows.view(torch.uint8)[0, 6] ^= 1
    with mock.patch.object(QuantizeTable, "run"):  # values that do not arrive are not hashed as if they had
        direct.load_in_place(found, 1, OwnMemory())  # type: ignore[arg-type]
    assert not torch.equal(sums[1]["read"], torch.frombuffer(bytearray(direct.sums()), dtype=torch.int64))
