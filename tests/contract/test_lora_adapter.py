# SPDX-License-Identifier: Apache-2.0
"""Adapter mode: what the leader hands to the engine is PEFT's own adapter; failures are everyone's, and pass."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model_state_dict
from worlds import on_ranks

from contract.fsdp_models import Layout, Variant, change, fsdp1, manager_of, peft_model, shard, torchs_own_state
from contract.sources import StandIn, same_everywhere
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.sync.manager import ShardingManager

# The second adapter is not served, and does not travel
VARIANT = Variant("all-linear", config={"target_modules": "all-linear"}, second={"target_modules": ["q_proj"]})


class Serving:
    """A trainer whose engine serves the adapter, and has its base already."""

    def __init__(self, layout: Layout) -> None:
        self.module, self.server = shard(peft_model(VARIANT), layout), StandIn()
        self.leads = dist.get_rank() == 0
        self.manager = self.manager_for("bfloat16")

    def manager_for(self, wire: str) -> ShardingManager:
        manager = manager_of(self.module, self.server, self.leads, merge=False, wire=wire)
        manager._base_sent = True
        return manager

    def failing(self, manager: ShardingManager | None = None) -> str:
        with pytest.raises(SyncError) as caught:
            asyncio.run((manager or self.manager).update_weights([], 0))
        return same_everywhere(str(caught.value))


def fail_and_recover(serving: Serving) -> None:
    last, started = dist.get_world_size() - 1, time.monotonic()
    with mock.patch.object(serving.manager.source, "shards", with_a_broken_factor(serving.manager.source, last)):
        assert f"rank {last}: torch.OutOfMemoryError: injected" in serving.failing()
    assert time.monotonic() - started < 5, "the others waited in the collective"
    serving.server.refuses = True
    assert "rank 0: RuntimeError: SGLang refused the adapter" in serving.failing()
    serving.server.refuses = False
    factor = next(parameter for name, parameter in serving.module.named_parameters() if "lora_A" in name)
    first: torch.Tensor = getattr(factor, "_local_tensor", factor).detach().view(-1)[:1]
    honest = first.clone()
    first.fill_(float("nan"))
    assert "lora_A.weight' holds NaN or Inf" in serving.failing()
    first.fill_(1e5)
    narrow = serving.manager_for("float16")
    assert "lora_A.weight' exceeds the range of float16, in which it travels" in serving.failing(narrow)
    first.copy_(honest)
    sent = len(serving.server.adapters)
    asyncio.run(serving.manager.update_weights([], 4))
    assert len(serving.server.adapters) == sent + serving.leads


def with_a_broken_factor(source: Any, rank: int) -> Any:
    """This rank comes to the gathering, and has no memory left to pack its part of one factor."""
    honest = source.shards

    def no_memory() -> torch.Tensor:
        raise torch.OutOfMemoryError("injected: out of memory")

    def shards() -> Any:
        found, factors = honest(), source.factors.shards
        if dist.get_rank() == rank:
            broken = next(name for name in factors if ".default." in name)
            factors[broken] = replace(factors[broken], local=no_memory)
        return found

    return shards


@pytest.mark.parametrize("layout", [Layout((1,)), Layout((3,)), fsdp1(2, True)], ids=str)
@on_ranks("layout", timeout=60)
def test_the_engine_gets_pefts_own_adapter(layout: Layout) -> None:
    reference, serving = peft_model(VARIANT), Serving(layout)
    for version in (1, 2, 3):
        report = asyncio.run(serving.manager.update_weights([], version))
        reference.load_state_dict(torchs_own_state(serving.module))
        expected = get_peft_model_state_dict(reference)
        if serving.leads:
            settings, got = serving.server.adapters[-1]
            assert got.keys() == expected.keys() and len(got) == report.tensors
            assert all(torch.equal(got[name], expected[name].bfloat16()) for name in expected)
            assert settings["r"] == 3 and settings["peft_type"] == "LORA" and report.stages["sleep"] == 0.5
        change(serving.module)
    fail_and_recover(serving)
