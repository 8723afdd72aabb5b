# SPDX-License-Identifier: Apache-2.0
"""In which dtype a parameter travels: the engine's, and never wider than the trainer's; and what the kernel makes of a
matrix that travels in fp8, compared with what verl's does, byte for byte. Triton's interpreter cuts where a GPU rounds:
there scales are the same, and values next to each other."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from contract.fsdp_models import open_source
from verl_sync_plugin.copies.copier import BucketMemory
from verl_sync_plugin.copies.packing import Packer
from verl_sync_plugin.engine.load import Assembler
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, Shard, View
from verl_sync_plugin.trainers import fp8
from verl_sync_plugin.trainers.base import ParameterSource, WirePolicy, wire_policy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("rollout", "trained", "kept", "before", "travels"),
    [
        ("bfloat16", FP32, "bfloat16", BF16, BF16),
        ("bfloat16", FP32, "float32", BF16, FP32),
        ("bfloat16", FP32, "", BF16, FP32),  # the engine computes from it: as the trainer has it
        ("bfloat16", BF16, "float32", BF16, BF16),
        ("float32", FP32, "bfloat16", FP32, BF16),
        ("float32", BF16, "float32", BF16, BF16),
        ("float16", BF16, "float32", FP16, BF16),
        ("half", FP32, "float16", FP16, FP16),
        ("auto", FP32, "float32", BF16, FP32),
        ("bfloat16", FP32, "int32", BF16, BF16),
        ("bfloat16", torch.int64, "float32", torch.int64, torch.int64),
    ],
)
def test_what_the_engine_keeps(
    rollout: str, trained: torch.dtype, kept: str, before: torch.dtype, travels: torch.dtype
) -> None:
    """Tensors of other names stay what they are."""
    policy = wire_policy(rollout)
    for names in (["a", "b"], ["a"], ["c"]):
        assert policy.of_parameter(names, trained) == before
    assert not policy.learn({"d": kept}, {})
    assert policy.learn({"b": kept}, {}) == (travels != before)
    assert policy.of_parameter(["a", "b"], trained) == travels
    assert policy.of_parameter(["a"], trained) == policy.of_parameter(["c"], trained) == before
    assert not policy.learn({"b": kept}, {}), "nothing new"


def test_the_widest_of_what_lies_in_one_storage() -> None:
    policy = WirePolicy(BF16)
    policy.of_parameter(["a", "b"], FP32)
    assert not policy.learn({"a": "bfloat16"}, {}) and policy.learn({"b": "float32"}, {})
    assert policy.of_parameter(["a", "b"], FP32) == FP32 and policy.of_parameter(["a"], FP32) == BF16


def test_a_name_that_is_no_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout\.dtype='bf16': not a torch dtype\. Set .*rollout\.dtype=bfloat16\."):
        wire_policy("bf16")


# Which names share a storage is seen in every sync, although a source looks closely only when something changed


def names_of(shards: list[Shard]) -> list[list[str]]:
    return [[view.name for view in shard.base.views] for shard in shards]


def test_ties_made_and_undone_between_syncs_and_a_parameter_that_was_replaced() -> None:
    module = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3, bias=False) for name in "abc"})
    module.config = SimpleNamespace(model_type="none")  # type: ignore[assignment]
    source = open_source(module)
    apart = [["a.weight"], ["b.weight"], ["c.weight"]]
    first = source.shards()
    assert names_of(first) == apart
    again = source.shards()
    assert all(one.base is other.base for one, other in zip(first, again, strict=True)), "described once more"
    module["c"].weight = module["a"].weight
    assert names_of(source.shards()) == [["a.weight", "c.weight"], ["b.weight"]]
    module["c"].weight = torch.nn.Parameter(torch.full((3, 3), 2.0))
    *_, shard = found = source.shards()
    assert names_of(found) == apart and shard.run is not None and not shard.run.requires_grad
    assert shard.local().data_ptr() == shard.run.data_ptr() == module["c"].weight.data_ptr()
    module["b"].weight = torch.nn.Parameter(module["c"].weight.detach())  # one storage, two parameters
    assert names_of(source.shards()) == [["a.weight"], ["b.weight", "c.weight"]]


# fp8


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
