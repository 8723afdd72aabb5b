# SPDX-License-Identifier: Apache-2.0
"""In which dtype a parameter travels: the engine's, and never wider than the trainer's."""

from types import SimpleNamespace

import pytest
import torch

from contract.fsdp_models import open_source
from verl_sync_plugin.layout.tensors import Shard
from verl_sync_plugin.trainers.base import WirePolicy, wire_policy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(("rollout", "trained", "kept", "before", "travels"), [
    ("bfloat16", FP32, "bfloat16", BF16, BF16),
    ("bfloat16", FP32, "float32", BF16, FP32),
    ("bfloat16", FP32, "", BF16, FP32),  # the engine computes from it: as the trainer has it
    ("bfloat16", BF16, "float32", BF16, BF16),
    ("float32", FP32, "bfloat16", FP32, BF16),
    ("float32", BF16, "float32", BF16, BF16),
    ("float16", BF16, "float32", FP16, BF16),
    ("half", FP32, "float16", FP16, FP16),
    ("bfloat16", FP32, "int32", BF16, BF16),
    ("bfloat16", torch.int64, "float32", torch.int64, torch.int64),
])  # fmt: skip
def test_what_is_kept(rollout: str, trained: torch.dtype, kept: str, before: torch.dtype, travels: torch.dtype) -> None:
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
