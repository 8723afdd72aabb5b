# SPDX-License-Identifier: Apache-2.0
"""In which dtype a parameter travels: the wire's, the trainer's, or what the engine said it would take."""

from __future__ import annotations

import pytest
import torch

from verl_sync_plugin.layout.tensors import View
from verl_sync_plugin.trainers.fsdp2 import FSDP2Source
from verl_sync_plugin.trainers.wire import WirePolicy, wire_policy

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("rollout", "trained", "kept", "travels"),
    [
        ("bfloat16", FP32, FP32, FP32),
        ("bfloat16", FP32, FP64, FP32),  # the engine computes from it: as the trainer has it
        ("bfloat16", BF16, FP32, BF16),
        ("float16", BF16, FP32, BF16),
        ("float16", FP32, FP32, FP32),
    ],
)
def test_what_the_engine_would_take(
    rollout: str, trained: torch.dtype, kept: torch.dtype, travels: torch.dtype
) -> None:
    policy = wire_policy(rollout)
    before = policy.of_parameter(["a", "b"], trained)
    assert policy.learn({"b": kept}) == (travels != before)
    assert policy.of_parameter(["a", "b"], trained) == travels
    assert policy.of_parameter(["c"], trained) == before if travels != before else True
    assert not policy.learn({"b": kept}), "nothing new"


def test_other_tensors_and_adapters_stay_what_they_are() -> None:
    policy = WirePolicy(BF16)
    for name in ("a", "base_model.model.a.lora_A.default.weight"):
        policy.of_parameter([name], FP32)
    assert not policy.learn({"b": FP32})
    assert policy.of_parameter(["steps"], torch.int64) == torch.int64


def test_the_engine_names_what_a_checkpoint_has() -> None:
    """A trainer may hold several tensors of a checkpoint in one of its own."""
    module = torch.nn.ModuleDict({"fused": torch.nn.Linear(3, 4, bias=False), "other": torch.nn.Linear(3, 3)})
    policy = WirePolicy(BF16)

    def halves(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        parts = tensor.chunk(2) if name == "fused.weight" else ()
        return [(f"part{number}.weight", part) for number, part in enumerate(parts)] or [(name, tensor)]

    def dtypes() -> dict[str, str]:
        source = FSDP2Source(module, policy, lambda pairs: (each for pair in pairs for each in halves(*pair)))
        found: dict[str, str] = {}
        for shard in source.shards():
            views: tuple[View, ...] = shard.base.views
            found.update((view.name, shard.base.dtype) for view in views)
        return found

    assert set(dtypes().values()) == {"bfloat16"}
    assert policy.learn({"part1.weight": FP32})
    assert [name for name, dtype in dtypes().items() if dtype == "float32"] == ["part0.weight", "part1.weight"]
