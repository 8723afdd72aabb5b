# SPDX-License-Identifier: Apache-2.0
"""A rank that is cancelled, or whose device fails where only readings are taken: no other waits for it in vain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lora_models import Layout, Variant, merging_source, peft_model, shard
from test_lora_adapter import Engine
from test_meeting import Comer, Loading
from worlds import run_world

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync.adapter import AdapterSender
from verl_sync_plugin.sync.endpoint import LoadOutcome
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.trainers.fsdp import PEFTAdapter
from verl_sync_plugin.transport.protocol import LoadRequest, Ready

CPU = torch.device("cpu")
BOUND = 10.0
BLOCKED = 600.0

Outcome = tuple[str, str, float]  # what was raised, its text, and the seconds until then


async def ended(work: Awaitable[Any], cancel: bool) -> Outcome:
    """How it ends, if it is cancelled after a while or not."""
    task, before = asyncio.ensure_future(work), time.monotonic()
    if cancel:
        await asyncio.sleep(0.5)
        task.cancel()
    try:
        await task
    except (Exception, asyncio.CancelledError) as error:
        return type(error).__name__, str(error), time.monotonic() - before
    return "", "", time.monotonic() - before


class Hanging(Comer):
    """Never answers."""

    async def resume(self, tags: list[str]) -> None:
        await asyncio.sleep(BLOCKED)

    async def finish(self, tags: list[str]) -> None:
        await asyncio.sleep(BLOCKED)

    async def load_adapter(self, config: Any, factors: Any, weight_version: str | None) -> LoadOutcome:
        await asyncio.sleep(BLOCKED)
        return LoadOutcome()

    def start_load(self, request: LoadRequest, weight_version: str | None) -> Loading:
        return HangingLoad()


class HangingLoad(Loading):
    def finished(self) -> bool:
        return True

    async def outcome(self, timeout: float) -> LoadOutcome:
        await asyncio.sleep(BLOCKED)
        return LoadOutcome()


class WithoutSource(ShardingManager):
    def open_source(self) -> ParameterSource:
        raise ValueError("no source")


def manager_of(engine: Engine) -> ShardingManager:
    return WithoutSource(None, engine, SyncConfig(timeout_seconds=BOUND), 1 << 20, CPU)


async def resumed(manager: ShardingManager) -> None:
    await manager.wake(["weights"], lambda: None)
    manager.agreement.settle("connecting to the engine")


def cancel_leader(where: str) -> tuple[Outcome, str]:
    """How this rank's part of a stage ends, and a later agreement."""
    engine, leads = Hanging(), dist.get_rank() == 0
    manager = manager_of(engine)
    agreement = manager.agreement
    work: Awaitable[Any]
    if where == "adapter":
        variant = Variant("all-linear", config={"target_modules": "all-linear"})
        module = shard(peft_model(variant), Layout((2,)))
        config = peft_model(variant).peft_config["default"]
        adapter = PEFTAdapter(merging_source(module, "qwen2", merge=False), config)
        sender = AdapterSender(adapter, torch.bfloat16, SyncConfig())
        work = sender.send(agreement, engine, SyncReport(), "1")
    elif where == "meet":
        manager.meeting.begin("1")
        manager.meeting.ask("1")
        work = manager.meeting.meet(Ready)
    elif where == "resume":
        work = resumed(manager)
    else:
        work = manager.finish(["kv_cache"])
    outcome = asyncio.run(ended(work, cancel=leads))
    try:
        agreement.settle("later")
    except SyncError as error:
        return outcome, str(error)
    return outcome, ""


@pytest.mark.parametrize("where", ["resume", "finish", "meet", "adapter"])
def test_a_cancelled_rank_is_cancelled_and_the_others_hear_of_it(where: str) -> None:
    (leader, later), (other, same) = run_world(2, cancel_leader, where, timeout=60)
    assert leader[0] == "CancelledError" and other[0] == "SyncError", (leader, other)
    assert "rank 0: RuntimeError: this rank was cancelled" in other[1]
    assert max(leader[2], other[2]) < BOUND
    assert later == same == "", "nothing is left of it for the next stage"


def fail_to_measure() -> Outcome:
    device = torch.device("cuda") if dist.get_rank() == 1 else CPU
    config = SyncConfig(timeout_seconds=BOUND)
    return asyncio.run(ended(WithoutSource(None, Comer(), config, 1 << 20, device).update_weights([], 1), cancel=False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error is that there is no CUDA")
def test_a_device_that_cannot_be_measured_is_everybodys_failure() -> None:
    outcomes = run_world(2, fail_to_measure, timeout=60)
    assert len({text for _, text, _ in outcomes}) == 1, outcomes
    for kind, text, seconds in outcomes:
        assert kind == "SyncError" and seconds < BOUND
        assert "rank 1: A" in text and "cuda" in text.lower(), text  # AssertionError or AttributeError: no such device
