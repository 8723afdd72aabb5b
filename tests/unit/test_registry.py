# SPDX-License-Identifier: Apache-2.0
"""Checks who may serve: managers by ``@register_sharding_manager``, and in verl's registries no other plugin."""

import asyncio
import importlib.util
import re
from types import SimpleNamespace
from typing import Any

import pytest
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, get_rollout_class
from verl.workers.rollout.replica import RolloutReplicaRegistry

from hydra_run import rollout_of
from verl_sync_plugin import sharding_manager
from verl_sync_plugin.config.settings import SHORT_BUCKET_KEY
from verl_sync_plugin.errors import RegistryConflictError
from verl_sync_plugin.hooks.driver import SyncRolloutConfig
from verl_sync_plugin.hooks.separate import SyncCheckpointEngine
from verl_sync_plugin.sharding_manager import get_sharding_manager, register_sharding_manager
from verl_sync_plugin.sync.manager import ShardingManager


class Mine(ShardingManager):
    """A third party's manager."""


class Theirs(Mine):
    """Another one for the same pair."""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding_manager, "_managers", dict(sharding_manager._managers))


def test_a_separate_rollout_refuses_a_manager_whose_source_it_would_not_open() -> None:
    register_sharding_manager(trainer="mine", rollout="sglang")(Mine)
    engine: Any = SimpleNamespace(_membership=SimpleNamespace(ranks=()), _rollout="sglang")
    with pytest.raises(ValueError, match=r"Mine has no backend, .* Name a TrainerBackend"):
        SyncCheckpointEngine._make_manager(engine, SimpleNamespace(trainer="mine"))  # type: ignore[arg-type]


def test_one_class_for_a_pair_and_any_number_of_pairs_for_a_class() -> None:
    assert get_sharding_manager("fsdp", "sglang") is get_sharding_manager("fsdp", "sglang")
    for _ in range(2):
        assert register_sharding_manager(trainer="mine", rollout="sglang")(Mine) is Mine
    register_sharding_manager(trainer="mine", rollout="other")(Mine)
    assert get_sharding_manager("mine", "sglang") is get_sharding_manager("mine", "other") is Mine
    for trainer, taken in (("mine", "Mine"), ("fsdp2", "FSDP2SGLangShardingManager")):
        with pytest.raises(RegistryConflictError) as caught:
            register_sharding_manager(trainer=trainer, rollout="sglang")(Theirs)
        text = f"trainer='{trainer}', rollout='sglang' is already {taken}; Theirs cannot take its place"
        assert text in str(caught.value)
    assert get_sharding_manager("mine", "sglang") is Mine
    register_sharding_manager(trainer="veomni", rollout="sglang")(Mine)
    assert rollout_of("model_engine=veomni", f"{SHORT_BUCKET_KEY}=64").custom.sync.enabled is True, "it serves the run"


def test_what_is_no_manager_or_not_there_is_refused() -> None:
    for stranger in (int, "Mine", lambda: None):
        with pytest.raises(TypeError, match="expects a ShardingManager subclass"):
            register_sharding_manager(trainer="stranger", rollout="sglang")(stranger)  # type: ignore[type-var]
    with pytest.raises(ValueError) as caught:
        get_sharding_manager("stranger", "sglang")
    text = str(caught.value)
    assert "actor_rollout_ref.actor.strategy='stranger' with actor_rollout_ref.rollout.name='sglang'" in text
    assert "fsdp->sglang" in text and "fsdp2->sglang" in text and "custom.sync.enabled=False" in text
    with pytest.raises(TypeError, match="Mine: name a backend"):
        object.__new__(Mine).open_source()


def test_an_engine_that_is_not_ours_is_refused_in_the_first_sync() -> None:
    adapter: Any = get_rollout_class("sglang")
    with pytest.raises(RegistryConflictError, match=r"another plugin .* VERL_ENGINE_VENDOR .*\.strategy "):
        asyncio.run(adapter.update_weights(SimpleNamespace(_separate=None), iter([]), global_steps=1))


def test_a_missing_engine_is_named_where_verl_asks_for_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes may run on machines without an engine."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *more: None if n == "sglang" else find(n, *more))
    SyncRolloutConfig(name="sglang", mode="async")
    with pytest.raises(ValueError, match=r"rollout\.name='sglang': SGLang is not installed in "):
        RolloutReplicaRegistry.get("sglang")


@pytest.mark.parametrize(("registry", "key", "what"), [
    (RolloutReplicaRegistry._registry, "sglang", "rollout replica"),
    (_ROLLOUT_REGISTRY, ("sglang", "async"), "rollout adapter"),
])  # fmt: skip
def test_a_key_taken_later_is_named(registry: Any, key: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry, key, "other.Strange")
    SyncRolloutConfig(name="vllm", mode="async")
    text = f"verl's {what} for sglang is already taken by 'other.Strange'"
    with pytest.raises(RegistryConflictError, match=re.escape(text)):
        SyncRolloutConfig(name="sglang", mode="async")
