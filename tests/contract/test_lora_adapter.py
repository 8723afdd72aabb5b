# SPDX-License-Identifier: Apache-2.0
"""Adapter mode: what the leader hands to the engine is PEFT's own adapter; failures are everyone's, and pass."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model_state_dict
from worlds import run_world

from contract.fsdp_models import (
    Layout,
    Variant,
    change,
    fsdp1,
    merging_source,
    peft_model,
    served_adapter,
    shard,
    torchs_own_state,
)
from contract.sources import StandIn, endpoint_of, same_everywhere
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.tensors import Shard
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync.adapter import AdapterSender
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.trainers.lora import MergingSource
from verl_sync_plugin.transport.agreement import Agreement

VARIANT = Variant("all-linear", config={"target_modules": "all-linear"})


def send_three_times(layout: Layout) -> None:
    reference = peft_model(VARIANT)
    module = shard(peft_model(VARIANT), layout)
    source = merging_source(module, "qwen2", merge=False)
    sender = AdapterSender(served_adapter(module, source), torch.bfloat16, SyncConfig())
    agreement, server = Agreement(20.0), StandIn()
    engine = endpoint_of(server, leader=dist.get_rank() == 0)
    for version in (1, 2, 3):
        report = SyncReport(version)
        asyncio.run(sender.send(agreement, engine, report, str(version)))
        reference.load_state_dict(torchs_own_state(module))
        expected = get_peft_model_state_dict(reference)
        if engine.leader:
            settings, got = server.adapters[-1]
            assert got.keys() == expected.keys() and len(got) == report.tensors
            assert all(torch.equal(got[name], expected[name].bfloat16()) for name in expected)
            assert settings["r"] == 3 and settings["peft_type"] == "LORA" and report.stages["sleep"] == 0.5
        change(module)
    fail_and_recover(module, source, sender, agreement, server, engine)


def fail_and_recover(
    module: torch.nn.Module,
    source: MergingSource,
    sender: AdapterSender,
    agreement: Agreement,
    server: StandIn,
    engine: RolloutEndpoint,
) -> None:
    def failing(sender: AdapterSender = sender) -> str:
        with pytest.raises(SyncError) as caught:
            asyncio.run(sender.send(agreement, engine, SyncReport(), None))
        return same_everywhere(str(caught.value))

    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        source.shards = partial(_with_a_broken_factor, source)  # type: ignore[method-assign]
    started = time.monotonic()
    assert f"rank {last}: torch.OutOfMemoryError: injected" in failing()
    assert time.monotonic() - started < 5, "the others waited in the collective"
    vars(source).pop("shards", None)
    server.refuses = True
    assert "rank 0: RuntimeError: SGLang refused the adapter" in failing()
    server.refuses = False
    factor = next(parameter for name, parameter in module.named_parameters() if "lora_A" in name)
    local: torch.Tensor = getattr(factor, "_local_tensor", factor).detach().view(-1)
    if local.numel():
        honest, local[0] = local[0].item(), float("nan")
    assert "lora_A.weight' holds NaN or Inf" in failing()
    if local.numel():
        local[0] = 1e5
    narrow = AdapterSender(sender._adapter, torch.float16, SyncConfig())
    assert "lora_A.weight' exceeds the range of float16, in which it travels" in failing(narrow)
    if local.numel():
        local[0] = honest
    sent = len(server.adapters)
    asyncio.run(sender.send(agreement, engine, SyncReport(), None))
    assert len(server.adapters) == sent + int(engine.leader)


def _with_a_broken_factor(source: MergingSource) -> list[Shard]:
    """The rank comes to the gathering, and has no memory left to pack its part of one factor."""

    def no_memory() -> torch.Tensor:
        raise torch.OutOfMemoryError("injected: out of memory")

    shards = MergingSource.shards(source)
    broken = next(iter(source.factors.shards))
    source.factors.shards[broken] = replace(source.factors.shards[broken], local=no_memory)
    return shards


@pytest.mark.parametrize("layout", [Layout((1,)), Layout((3,)), fsdp1(2, True)], ids=str)
def test_the_engine_gets_pefts_own_adapter(layout: Layout) -> None:
    run_world(layout.size, send_three_times, layout, timeout=60)
