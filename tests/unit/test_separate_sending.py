# SPDX-License-Identifier: Apache-2.0
"""The trainer rank's side of a separate sync, in whatever worker of verl's it runs."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from verl.experimental.separation.engine_workers import DetachActorWorker

from verl_sync_plugin.hooks import worker
from verl_sync_plugin.hooks.separate import SyncCheckpointEngine
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync.membership import Membership
from verl_sync_plugin.trainers.shard_stream import ShardStream


@pytest.mark.parametrize("offloaded", [True, False])
def test_a_separate_sync_waits_for_what_is_on_its_way_to_the_host(
    offloaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever worker: ``one_step_off`` and ``fully_async`` make verl's own, which know nothing of ours."""
    order: list[Any] = []
    device = SimpleNamespace(synchronize=lambda: order.append("waited"))
    monkeypatch.setattr(worker, "get_torch_device", lambda: device)
    monkeypatch.setattr(worker, "set_expandable_segments", order.append)
    monkeypatch.setattr(worker, "offload", lambda engine: order.append("offloaded"))

    def fails(*_: Any) -> Any:
        order.append("sync")
        raise RuntimeError("injected")

    def left() -> None:
        order.append("left")

    sender = SyncCheckpointEngine(1 << 20, rollout="sglang")
    member = Membership(torch.device("cpu"), trainer=True, first=False, timeout_seconds=1.0)
    member.ranks = SimpleNamespace(close=left)  # type: ignore[assignment]
    monkeypatch.setattr(sender, "_membership", member)
    monkeypatch.setattr(SyncCheckpointEngine, "_manager_for", fails)
    training_engine = SimpleNamespace(
        is_param_offload_enabled=offloaded, get_per_tensor_param=lambda: (ShardStream(training_engine, list), None)
    )
    verls = SimpleNamespace(
        config=OmegaConf.create({"rollout": {"checkpoint_engine": {"backend": "sync_plugin"}}}),
        actor=SimpleNamespace(engine=training_engine),
        checkpoint_engine=sender,
    )
    with pytest.raises(RuntimeError, match="injected"):
        asyncio.run(DetachActorWorker.update_weights(verls, 7, "sync_plugin"))
    # NCCL may hang on the device, where offloading would wait for it
    assert order == [False, *(["waited"] if offloaded else []), "sync", "left", "offloaded", True]


def test_the_others_hear_of_a_stream_that_is_not_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, closed = SyncCheckpointEngine(1 << 20, rollout="sglang"), []
    member = Membership(torch.device("cpu"), trainer=True, first=False, timeout_seconds=1.0)
    member.ranks = SimpleNamespace(close=lambda: closed.append(True))  # type: ignore[assignment]
    monkeypatch.setattr(sender, "_membership", member)
    with pytest.raises(ValueError, match="plain weight stream"):
        asyncio.run(sender.send_weights(iter(()), 7))
    assert closed and member.ranks is None


@pytest.mark.parametrize("first", [True, False])
def test_trainer_rank_0_hands_verl_what_a_sync_cost(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own manager gives it to its trainer: ``one_step_off`` has none of the plugin's."""
    report = SyncReport.begun(7, "SeparateTrainer", 0)
    report.stages["update_weights"] = 0.25

    async def nothing(*_: Any) -> None: ...

    manager = SimpleNamespace(report=report, update_weights=nothing, finish=nothing)
    sender = SyncCheckpointEngine(1 << 20, is_master=first, rollout="sglang")
    monkeypatch.setattr(sender, "_membership", SimpleNamespace(ranks=object(), taking_part=nullcontext))
    monkeypatch.setattr(SyncCheckpointEngine, "_manager_for", lambda *_: manager)
    monkeypatch.setattr(worker, "sending", lambda _: nullcontext())
    metrics = asyncio.run(sender.send_weights(ShardStream(SimpleNamespace(), list), 7))
    if first:
        assert metrics["sync/active"] == 1 and metrics["sync/weight_version"] == 7
        assert metrics["timing_s/sync/update_weights"] == 0.25 == metrics["timing_s/sync/phase"]
        assert "sync/bytes" in metrics and "sync/coverage_expected" not in metrics, "counted beside engines"
    else:
        assert metrics == {}
