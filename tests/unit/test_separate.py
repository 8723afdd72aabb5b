# SPDX-License-Identifier: Apache-2.0
"""A rollout on GPUs of its own: who may be in one group, and what a trainer rank refuses before anything is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from verl_sync_plugin.hooks.separate import SyncCheckpointEngine
from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.sync.endpoint import RolloutEndpoint


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """The trainer's, of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def members(**last: Any) -> list[Any]:
    """Two trainer ranks and a rollout rank, each with a GPU; and what the last one has."""
    one = SyncCheckpointEngine(1 << 20, is_master=False, rollout="sglang").prepare()
    trainers = [replace(one, key=f"t{rank}", place=rank, world=2, device=f"gpu-{rank}") for rank in range(2)]
    return [*trainers, replace(one, **{"key": "r", "trainer": False, "device": "gpu-2", **last})]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("last", "text"),
    [
        ({"device": "gpu-1"}, r"trainer rank 1 of 2, rollout rank 0 of 1 compute on the same GPU \(gpu-1\)"),
        ({"cumem": "0"}, r"NCCL_CUMEM_ENABLE differs .* rollout rank 0 of 1 has 0"),
    ],
)
def test_ranks_that_nccl_cannot_join_are_refused(last: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SyncCheckpointEngine.build_topology(2, 1, members(**last))


def test_a_trainer_rank_refuses_what_no_engine_of_the_rollout_could_serve_or_hold() -> None:
    """The driver may have had neither the adapter nor the checkpoint."""
    nobody = RolloutEndpoint(rollout_of("sglang"), None)
    assert not nobody.leader and nobody.ranks == ()
    nobody.engine.refuse_adapter({"r": 8}, {})
    with pytest.raises(ValueError, match=r"cannot serve an adapter with use_rslora=True.*lora\.merge=True"):
        nobody.engine.refuse_adapter({"r": 8, "use_rslora": True}, {})
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        nobody.engine.refuse_untied(("GPT2LMHeadModel",), "the adapter's Embedding")


def test_the_others_hear_of_a_stream_that_is_not_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, closed = SyncCheckpointEngine(1 << 20, is_master=False, rollout="sglang"), []
    sender.prepare()
    member: Any = sender._membership
    member.ranks = SimpleNamespace(close=lambda: closed.append(True))
    with pytest.raises(ValueError, match="plain weight stream"):
        asyncio.run(sender.send_weights(iter(()), 7))
    assert closed and member.ranks is None
