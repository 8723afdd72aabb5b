# SPDX-License-Identifier: Apache-2.0
"""A rollout on GPUs of its own: who may be in one group, and a trainer rank's side of a sync in verl's own worker."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from verl.experimental.separation.engine_workers import DetachActorWorker

from verl_sync_plugin.hooks import worker
from verl_sync_plugin.hooks.separate import SyncCheckpointEngine
from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.sync.membership import Member, Membership, topology
from verl_sync_plugin.trainers.shard_stream import ShardStream

TRAINERS = [Member("t0", True, 0, 2, "gpu-0", store=("host", 1)), Member("t1", True, 1, 2, "gpu-1")]
ROLLOUTS = [Member(f"r{rank}", False, 0, 1, f"gpu-{rank + 2}") for rank in (0, 1)]


def test_trainer_ranks_come_first_and_everybody_hears_of_all() -> None:
    trainer, rollout = topology(2, 2, [*TRAINERS, *ROLLOUTS])
    assert trainer["rank"] == [0, 1] and rollout["rank"] == [2, 3]
    assert {*trainer["members"], *rollout["members"]} == {(*TRAINERS, *ROLLOUTS)}


def test_two_ranks_on_one_gpu_are_refused() -> None:
    shared = replace(ROLLOUTS[0], device="gpu-1")
    with pytest.raises(ValueError, match=r"trainer rank 1 of 2, rollout rank 0 of 1 compute on the same GPU \(gpu-1\)"):
        topology(2, 1, [*TRAINERS, shared])


def test_ranks_that_set_up_nccl_otherwise_are_refused() -> None:
    other = replace(ROLLOUTS[0], cumem="0")
    with pytest.raises(ValueError, match=r"NCCL_CUMEM_ENABLE differs .* rollout rank 0 of 1 has 0"):
        topology(2, 1, [*TRAINERS, other])


def test_a_trainer_rank_refuses_what_no_engine_of_the_rollout_could_serve_or_hold() -> None:
    """Before anything is sent; the driver may have had neither the adapter nor the checkpoint."""
    nobody = RolloutEndpoint(rollout_of("sglang"), None)
    assert not nobody.leader and nobody.ranks == ()
    nobody.refuse_adapter({"r": 8})
    with pytest.raises(ValueError, match=r"cannot serve an adapter with use_rslora=True.*lora\.merge=True"):
        nobody.refuse_adapter({"r": 8, "use_rslora": True})
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        nobody.refuse_untied(("GPT2LMHeadModel",), "the adapter's Embedding")


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
