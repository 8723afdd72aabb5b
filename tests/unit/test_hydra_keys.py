# SPDX-License-Identifier: Apache-2.0
"""Our keys in verl's own configuration, composed by Hydra."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import verl
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass

import unmeasured
from verl_sync_plugin.config.settings import (
    DEFAULT_MEGABYTES,
    KEY_PREFIX,
    LONG_BUCKET_KEY,
    SHORT_BUCKET_KEY,
    SyncConfig,
    sync_config_of,
)
from verl_sync_plugin.hooks.driver import SyncRolloutConfig, check_rollout, settle

CONFIG_DIR = Path(verl.__file__).parent / "trainer" / "config"
ROLLOUT = "actor_rollout_ref.rollout"
SGLANG = f"{ROLLOUT}.name=sglang"

# (config name, overrides) of verl's ways to choose a trainer
TRAINERS = [
    pytest.param("ppo_trainer", (), id="ppo_trainer"),
    pytest.param("ppo_trainer", ("model_engine=megatron",), id="model_engine=megatron"),
    pytest.param("ppo_megatron_trainer", (), id="ppo_megatron_trainer"),
]


@pytest.fixture(scope="module", autouse=True)
def hydra_in_verls_folder() -> Iterator[None]:
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        yield


def rollout_of(*overrides: str, name: str = "ppo_trainer") -> DictConfig:
    """As composed: nothing is settled, as for a program of the user's."""
    config = compose(name, overrides=[SGLANG, *overrides])
    rollout: DictConfig = config.actor_rollout_ref.rollout
    return rollout


def settled(*overrides: str, name: str = "ppo_trainer") -> DictConfig:
    """As the driver leaves it."""
    config = compose(name, overrides=[SGLANG, *overrides])
    settle(config)
    once = OmegaConf.to_container(config)
    settle(config)
    assert OmegaConf.to_container(config) == once, "settling a second time changes something"
    rollout: DictConfig = config.actor_rollout_ref.rollout
    return rollout


Made = Callable[..., DictConfig]
either = pytest.mark.parametrize("made", [rollout_of, settled])


def built(rollout: DictConfig) -> SyncRolloutConfig:
    """The dataclass as verl's processes make it."""
    config = omega_conf_to_dataclass(rollout)
    assert type(config) is SyncRolloutConfig
    return config


@either
@pytest.mark.parametrize(("name", "engine"), TRAINERS)
def test_both_bucket_keys_say_what_the_run_uses(name: str, engine: tuple[str, ...], made: Made) -> None:
    for overrides, megabytes in (
        ((), DEFAULT_MEGABYTES),
        ((f"{SHORT_BUCKET_KEY}=64",), 64),
        ((f"{LONG_BUCKET_KEY}=64",), 64),
        ((f"{SHORT_BUCKET_KEY}=128", f"{LONG_BUCKET_KEY}=128"), 128),
    ):
        config = built(made(*engine, *overrides, name=name))
        assert config.update_weights_bucket_megabytes == megabytes
        assert config.checkpoint_engine.update_weights_bucket_megabytes == megabytes
        assert config.multi_stage_wake_up is True and sync_config_of(config) == SyncConfig()


@either
@pytest.mark.parametrize("off", [f"{ROLLOUT}.name=vllm", f"{KEY_PREFIX}.enabled=False"])
@pytest.mark.parametrize(("name", "engine"), TRAINERS)
def test_verls_bucket_where_verl_moves_the_weights(name: str, engine: tuple[str, ...], off: str, made: Made) -> None:
    stock = OmegaConf.load(CONFIG_DIR / "rollout" / "rollout.yaml").checkpoint_engine.update_weights_bucket_megabytes
    for short, expected in (("null", stock), (64, 64)):
        rollout = made(*engine, off, f"{SHORT_BUCKET_KEY}={short}", name=name)
        assert omega_conf_to_dataclass(rollout).checkpoint_engine.update_weights_bucket_megabytes == expected


def test_settings_survive_the_trip_through_yaml() -> None:
    given = {"timeout_seconds": 12.5, "verify": "always", "delivery": "staged", "max_probs_diff": 0.02, "enabled": True}
    rollout = rollout_of(*(f"{KEY_PREFIX}.{key}={value}" for key, value in given.items()), f"{SHORT_BUCKET_KEY}=64")
    config = built(OmegaConf.create(OmegaConf.to_yaml(rollout, resolve=True)))
    assert sync_config_of(config) == SyncConfig(**given)  # type: ignore[arg-type]
    assert config.checkpoint_engine.update_weights_bucket_megabytes == 64


def test_everything_else_is_verls() -> None:
    ours, stock = rollout_of(f"+{ROLLOUT}.custom.mine=1"), OmegaConf.load(CONFIG_DIR / "rollout" / "rollout.yaml")
    changed = {"name", "_target_", "custom", "checkpoint_engine", "update_weights_bucket_megabytes", "defaults"}
    for key in set(stock) - changed - {"multi_stage_wake_up"}:
        assert OmegaConf.to_container(ours)[key] == OmegaConf.to_container(stock)[key], key
    assert set(ours) - set(stock) <= {"custom", "update_weights_bucket_megabytes", "multi_stage_wake_up"}
    assert ours.custom.mine == 1 and sync_config_of(built(ours)) == SyncConfig()


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (f"{KEY_PREFIX}.timeout_second=5", f"Did you mean {KEY_PREFIX}.timeout_seconds?"),
        (f"{KEY_PREFIX}.copy_plan=False", f"{KEY_PREFIX}.copy_plan=False: gone; remove it"),
        (f"{SHORT_BUCKET_KEY}=auto", f"{SHORT_BUCKET_KEY}='auto': gone"),
        (f"{LONG_BUCKET_KEY}=-1", f"{LONG_BUCKET_KEY}=-1"),
    ],
)
def test_our_check_explains_bad_keys(override: str, text: str) -> None:
    rollout = rollout_of(override)
    for check in (check_rollout, omega_conf_to_dataclass, lambda _: settled(override)):
        with pytest.raises(Exception) as caught:
            check(rollout)
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [f"{ROLLOUT}.update_weights_bucket_megabyte", f"{ROLLOUT}.custom.bogus", "actor_rollout_ref.actor.bogus", "bogus"],
)
def test_other_bogus_keys_still_fail_in_hydra(key: str) -> None:
    with pytest.raises(ConfigCompositionException):
        rollout_of(f"{key}=1")


def test_what_verl_moves_is_left_alone() -> None:
    for override in (f"{SHORT_BUCKET_KEY}=0", f"{ROLLOUT}.quantization=fp8", f"{KEY_PREFIX}.enabled=False"):
        rollout = compose("ppo_trainer", overrides=[f"{ROLLOUT}.name=vllm", override]).actor_rollout_ref.rollout
        check_rollout(rollout)
    assert omega_conf_to_dataclass(rollout).name == "vllm"
    check_rollout(rollout_of(f"{KEY_PREFIX}.enabled=False", f"{ROLLOUT}.quantization=fp8"))


def run_main_ppo(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    environment: dict[str, Any] = {**unmeasured.environment(), "HYDRA_FULL_ERROR": "0"}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", SGLANG, f"hydra.run.dir={folder}", *overrides]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ((f"{SHORT_BUCKET_KEY}=512", f"{LONG_BUCKET_KEY}=1024"), "both given and differ"),
        (
            ("actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.model.lora_rank=4"),
            "actor_rollout_ref.model.lora.rank=8 and actor_rollout_ref.model.lora_rank=4 are both given and differ",
        ),
    ],
)
def test_main_ppo_stops_before_ray(tmp_path: Path, overrides: tuple[str, ...], text: str) -> None:
    ended = run_main_ppo(tmp_path, *overrides)
    output = ended.stdout + ended.stderr
    assert ended.returncode != 0 and text in output and "verl-sync-plugin: " in output
    assert "Traceback" not in output and "Started a local Ray instance" not in output
