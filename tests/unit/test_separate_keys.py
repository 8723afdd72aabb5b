# SPDX-License-Identifier: Apache-2.0
"""A rollout on GPUs of its own: what the driver hands on and refuses, and who may be in one group."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hydra_run import refused, rollout_of
from verl_sync_plugin.config.settings import KEY_PREFIX, SEPARATE_BACKEND
from verl_sync_plugin.errors import RankLostError, SyncError
from verl_sync_plugin.rollouts import rollout_of as rollout_of_name
from verl_sync_plugin.sync import membership
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.sync.membership import Member, topology

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend={SEPARATE_BACKEND}"
SGLANG = f"{ROLLOUT}.name=sglang"
SEPARATE = ("+sync=separate", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=2")


@pytest.mark.parametrize(
    ("overrides", "shown", "remedy"),
    [
        ((BACKEND, f"{KEY_PREFIX}.enabled=False"), f"{KEY_PREFIX}.enabled=False with {ROLLOUT}", "another backend"),
        (
            (BACKEND, f"{KEY_PREFIX}.pause=retract"),
            f"{KEY_PREFIX}.pause='retract' with trainer.v1.trainer_mode=sync",
            f"Set trainer.v1.trainer_mode=separate_async, or {KEY_PREFIX}.pause=abort",
        ),
        (
            ("+sync=separate", f"{ROLLOUT}.n_gpus_per_node=4"),
            f"{ROLLOUT}.nnodes=0 and {ROLLOUT}.n_gpus_per_node=4 with trainer.v1.trainer_mode=separate_async",
            f"for example {ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=4",
        ),
        (
            (*SEPARATE, f"{MODEL}.lora.rank=8", f"{KEY_PREFIX}.pause=retract"),
            f"{KEY_PREFIX}.pause='retract' with {MODEL}.lora.merge=False and LoRA rank 8",
            f"Set {KEY_PREFIX}.pause=abort, or {MODEL}.lora.merge=True",
        ),
        (
            (BACKEND, f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1", f"{ROLLOUT}.tensor_model_parallel_size=2"),
            f"{ROLLOUT}.nnodes=1 and {ROLLOUT}.n_gpus_per_node=1",
            "one engine needs 2",
        ),
        (
            (
                BACKEND,
                f"{KEY_PREFIX}.pause=in_place",
                "+async_training.staleness_threshold=0.1",
            ),  # a key of fully_async
            f"{KEY_PREFIX}.pause='in_place' with verl's fully_async",
            f"Set {KEY_PREFIX}.pause=abort",
        ),
    ],
)
def test_refused_in_the_driver_by_key_value_and_remedy(
    overrides: tuple[str, ...], shown: str, remedy: str, tmp_path: Path
) -> None:
    text = refused(tmp_path, SGLANG, *overrides)
    assert shown in text and remedy in text, text


def test_the_backend_gets_the_settings_that_verl_would_not_hand_it(tmp_path: Path) -> None:
    rollout = rollout_of(tmp_path, SGLANG, BACKEND, f"{KEY_PREFIX}.timeout_seconds=60", f"{ROLLOUT}.dtype=float16")
    given = rollout["checkpoint_engine"]["engine_kwargs"][SEPARATE_BACKEND]
    assert given["sync"]["timeout_seconds"] == 60
    assert given["dtype"] == "float16" and given["rollout"] == "sglang"


def test_the_composition_for_separate_rollouts(tmp_path: Path) -> None:
    rollout = rollout_of(tmp_path, *SEPARATE)
    assert rollout["checkpoint_engine"]["backend"] == SEPARATE_BACKEND
    assert rollout["checkpoint_engine"]["update_weights_bucket_megabytes"] == 512


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


def test_after_a_failed_sync_all_make_a_new_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(membership.dist, "get_world_size", lambda: 1)
    member = membership.Membership(torch.device("cpu"), trainer=False, first=False, timeout_seconds=1.0)
    ended: list[str] = []
    group = SimpleNamespace(close=partial(ended.append, "all"), end_bytes=partial(ended.append, "bytes"))
    # What all have agreed to raise is still on its way to some of them; transfers that not all have begun would hang
    ends = ((SyncError, "bytes"), (RankLostError, "all"), (ValueError, "all"))
    for error, end in ends:
        ended.clear()
        member.ranks, member._name = group, "name"  # type: ignore[assignment]
        with pytest.raises(error), member.taking_part():
            raise error("injected")
        assert member.describe().group == "" and ended == [end], error


def test_a_sync_that_ends_late_leaves_the_group_of_the_next_alone() -> None:
    member = membership.Membership(torch.device("cpu"), trainer=False, first=False, timeout_seconds=1.0)
    closed: list[str] = []
    old, new = (SimpleNamespace(close=partial(closed.append, name)) for name in ("old", "new"))
    member.ranks = old  # type: ignore[assignment]
    with pytest.raises(RankLostError), member.taking_part():
        member.ranks, member._name = new, "next"  # type: ignore[assignment]
        raise RankLostError("injected")
    assert member.ranks is new and member._name == "next" and closed == ["old"]


def test_a_trainer_rank_refuses_what_no_engine_of_the_rollout_could_serve_or_hold() -> None:
    """Before anything is sent; the driver may have had neither the adapter nor the checkpoint."""
    nobody = RolloutEndpoint(rollout_of_name("sglang"), None)
    assert not nobody.leader and nobody.ranks == ()
    nobody.refuse_adapter({"r": 8})
    with pytest.raises(ValueError, match=r"cannot serve an adapter with use_rslora=True.*lora\.merge=True"):
        nobody.refuse_adapter({"r": 8, "use_rslora": True})
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        nobody.refuse_untied(("GPT2LMHeadModel",), "the adapter's Embedding")
