# SPDX-License-Identifier: Apache-2.0
"""``@register_sharding_manager`` and the look-up."""

from __future__ import annotations

import pytest

from verl_sync_plugin import sharding_manager as registry
from verl_sync_plugin.errors import RegistryConflictError
from verl_sync_plugin.sharding_manager import get_sharding_manager, register_sharding_manager
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.trainers.fsdp import FSDP1Trainer, FSDP2Trainer
from verl_sync_plugin.trainers.megatron.trainer import MegatronTrainer


class Mine(ShardingManager):
    """A third party's manager."""

    def open_source(self) -> ParameterSource:
        raise NotImplementedError


class Theirs(Mine):
    """Another one for the same pair."""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    get_sharding_manager("fsdp2", "sglang")  # the built-in ones are registered now
    monkeypatch.setattr(registry, "_managers", dict(registry._managers))


def test_registered_manager_is_found() -> None:
    assert register_sharding_manager(trainer="mine", rollout="sglang")(Mine) is Mine
    assert get_sharding_manager("mine", "sglang") is Mine


def test_built_in_managers() -> None:
    for trainer, backend in (("fsdp", FSDP1Trainer), ("fsdp2", FSDP2Trainer), ("megatron", MegatronTrainer)):
        manager = get_sharding_manager(trainer, "sglang")
        assert issubclass(manager, ShardingManager)
        assert manager.backend is backend


def test_second_class_for_a_pair_is_refused() -> None:
    register_sharding_manager(trainer="mine", rollout="sglang")(Mine)
    with pytest.raises(RegistryConflictError) as caught:
        register_sharding_manager(trainer="mine", rollout="sglang")(Theirs)
    text = str(caught.value)
    assert "trainer='mine', rollout='sglang' is already Mine" in text
    assert "Theirs cannot take its place" in text
    assert get_sharding_manager("mine", "sglang") is Mine


def test_same_class_twice_is_harmless() -> None:
    for _ in range(2):
        register_sharding_manager(trainer="mine", rollout="sglang")(Mine)


def test_one_class_may_serve_two_pairs() -> None:
    register_sharding_manager(trainer="mine", rollout="vllm")(register_sharding_manager(trainer="m", rollout="v")(Mine))
    assert get_sharding_manager("mine", "vllm") is get_sharding_manager("m", "v") is Mine


@pytest.mark.parametrize("stranger", [int, "Mine", lambda: None])
def test_stranger_is_refused(stranger: object) -> None:
    with pytest.raises(TypeError, match="expects a ShardingManager subclass"):
        register_sharding_manager(trainer="mine", rollout="sglang")(stranger)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="no sharding manager"):
        get_sharding_manager("mine", "sglang")


def test_unknown_pair_names_keys_choices_and_way_out() -> None:
    with pytest.raises(ValueError) as caught:
        get_sharding_manager("megatron9", "sglang")
    text = str(caught.value)
    assert "actor_rollout_ref.actor.strategy='megatron9'" in text
    assert "actor_rollout_ref.rollout.name='sglang'" in text
    assert "fsdp->sglang" in text and "fsdp2->sglang" in text
    assert "custom.sync.enabled=False" in text


def test_a_manager_without_a_backend_says_what_it_lacks() -> None:
    class Bare(ShardingManager):
        def __init__(self) -> None:
            """Without a run around it."""

    with pytest.raises(TypeError, match="Bare: name a backend"):
        Bare().open_source()
