# SPDX-License-Identifier: Apache-2.0
"""The trainer rank's side of a separate sync, in whatever worker of verl's it runs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from verl.experimental.separation.engine_workers import DetachActorWorker

from verl_sync_plugin.hooks import worker
from verl_sync_plugin.hooks.separate import SyncCheckpointEngine
from verl_sync_plugin.sync.membership import Membership
from verl_sync_plugin.sync.separate import SeparateRollout
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


def test_no_two_syncs_have_one_name_also_in_a_new_group() -> None:
    """An engine rank that is late may complain of a sync of the group before."""
    named = []
    for group in ("one", "another"):
        rank = object.__new__(SeparateRollout)
        rank._syncs, rank._ranks = 0, SimpleNamespace(name=group)  # type: ignore[assignment]
        named += [rank.name_sync(7), rank.name_sync(7)]
    assert named[0] == "1 (step 7) of group one" and len(set(named)) == 4
