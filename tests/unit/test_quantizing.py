# SPDX-License-Identifier: Apache-2.0
"""Compares what the kernel makes of matrices in fp8 with what verl's does, byte for byte. Triton's interpreter cuts
where a GPU rounds: there scales are the same, and values next to each other."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch

from verl_sync_plugin.copies.copier import BucketMemory
from verl_sync_plugin.copies.packing import Packer
from verl_sync_plugin.engine.load import Assembler
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, Shard, View
from verl_sync_plugin.trainers import fp8
from verl_sync_plugin.trainers.base import ParameterSource, WirePolicy

SHAPES = {"even": (256, 384), "uneven": (150, 300), "small": (5, 130), "wide": (1, 5000), "zero": (128, 128)}


class Whole(ParameterSource):
    """Matrices that one rank holds whole."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self._state = state

    def shards(self) -> list[Shard]:
        return [
            Shard(
                Base(name, "bfloat16", 2, (t.numel(),), (View(name, (*t.shape,), 0, t.numel()),)), partial(t.view, -1)
            )
            for name, t in self._state.items()
        ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bucket_bytes", [6_016, 64 << 20])
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
    for each in range(2):  # the second with other weights and the tables of the first
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
            weight.copy_((weight * -1.7).to(weight.dtype if on_a_gpu else torch.bfloat16))
        shards = source.shards()
    state["even"][-1, -1] = torch.nan
    shards = source.shards()
    packer.begin()
    for index, bucket in enumerate(plan.buckets):
        list(source.prepare(bucket.bases))
        packer.pack(index, torch.empty(plan.slot_bytes, dtype=torch.uint8, device=device), shards)
    names = {entry.name for index in packer.broken() for entry in plan.buckets[index].entries}
    assert "even_scale_inv" in names
