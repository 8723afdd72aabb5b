# SPDX-License-Identifier: Apache-2.0
"""What of a Megatron trainer's keys is refused before Ray starts, and what passes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import verl
from hydra import compose, initialize_config_dir

from verl_sync_plugin.config import refusals
from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.hooks.driver import settle, settle_trainer

CONFIG_DIR = Path(verl.__file__).parent / "trainer" / "config"
MODEL = "actor_rollout_ref.model"
MEGATRON = "actor_rollout_ref.actor.megatron"
LORA = (f"++{MODEL}.lora.rank=8", f"++{MODEL}.lora.merge=True")


@pytest.fixture(scope="module", autouse=True)
def hydra_in_verls_folder() -> Iterator[None]:
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        yield


def config_of(*overrides: str, name: str = "ppo_megatron_trainer") -> Any:
    return compose(name, overrides=["actor_rollout_ref.rollout.name=sglang", *overrides])


def actor_of(*overrides: str, name: str = "ppo_megatron_trainer") -> Any:
    return config_of(*overrides, name=name).actor_rollout_ref


@pytest.mark.parametrize(
    ("name", "engine"), [("ppo_megatron_trainer", ()), ("ppo_trainer", ("model_engine=megatron",))]
)
def test_megatron_passes(name: str, engine: tuple[str, ...]) -> None:
    actor = actor_of(*engine, name=name)
    assert actor.actor.strategy == "megatron"
    settle_trainer(actor)


def test_lora_needs_megatron_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_has_megatron_bridge", lambda: False)
    with pytest.raises(ValueError, match=r"LoRA rank 8 with .*strategy=megatron.* megatron\.bridge.* is not installed"):
        settle_trainer(actor_of(*LORA, f"{MEGATRON}.vanilla_mbridge=False"))


@pytest.mark.parametrize("merge", ["True", "False"])
def test_lora_passes_with_megatron_bridge(merge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_has_megatron_bridge", lambda: True)
    settle_trainer(actor_of(*LORA, f"{MEGATRON}.vanilla_mbridge=False", f"++{MODEL}.lora.merge={merge}"))


@pytest.mark.parametrize("verify", ["always", "3"])
def test_adapters_that_the_engine_serves_are_not_compared(verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_has_megatron_bridge", lambda: True)
    given = (*LORA, f"{MEGATRON}.vanilla_mbridge=False", f"{KEY_PREFIX}.verify={verify}")
    with pytest.raises(ValueError, match=r"custom\.sync\.verify='?(always|3)'? with .*merge=False and LoRA rank 8: "):
        settle(config_of(*given, f"++{MODEL}.lora.merge=False"))
    settle(config_of(*given, f"++{MODEL}.lora.merge=True"))


@pytest.mark.parametrize("merge", ["True", "False"])
def test_dora_is_refused(merge: str) -> None:
    with pytest.raises(ValueError, match=r"lora\.type='dora' with .*strategy=megatron: .* Set .*lora\.type=lora"):
        settle_trainer(actor_of(f"++{MODEL}.lora.rank=8", f"++{MODEL}.lora.type=dora", f"++{MODEL}.lora.merge={merge}"))


def test_merge_without_a_rank_is_said_to_have_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    settle_trainer(actor_of(f"++{MODEL}.lora.merge=True"))
    said = capsys.readouterr().out
    assert "actor_rollout_ref.model.lora.merge=True has no effect without a LoRA rank" in said
    settle_trainer(actor_of())
    assert "no effect" not in capsys.readouterr().out


@pytest.mark.parametrize("frozen", [True, False])
def test_freezing_the_tower_is_said_to_have_no_effect(frozen: bool, capsys: pytest.CaptureFixture[str]) -> None:
    settle_trainer(actor_of(f"++actor_rollout_ref.actor.freeze_vision_tower={frozen}"))
    assert ("freeze_vision_tower=True has no effect" in capsys.readouterr().out) is frozen


@pytest.mark.parametrize("composition", ["colocated", "colocated_resident", "colocated_tight_memory_megatron"])
def test_ready_compositions(composition: str) -> None:
    actor = actor_of(f"+sync={composition}")
    settle_trainer(actor)
    stock = compose("ppo_megatron_trainer").actor_rollout_ref.actor.megatron
    assert actor.actor.megatron.keys() == stock.keys(), "verl has no such key"
    assert actor.actor.megatron.param_offload is ("tight_memory" in composition)
    assert actor.rollout.free_cache_engine is (composition != "colocated_resident")
