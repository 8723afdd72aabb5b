# SPDX-License-Identifier: Apache-2.0
"""Hydra's own run and multirun of a config of verl's, up to the task function: what a ``hydra.main`` of verl gets."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import hydra
import pytest
import verl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_sync_plugin.hooks.driver import CheckKeys

CONFIG_DIR = Path(verl.__file__).parent / "trainer" / "config"


@contextmanager
def _hydra(config_dir: Path, program: str) -> Iterator[Hydra]:
    hydra.version.setbase(None)  # as verl
    GlobalHydra.instance().clear()
    try:
        yield Hydra.create_main_hydra2(program, create_config_search_path(f"file://{config_dir}"))
    finally:
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None


def run(
    folder: Path, *overrides: str, name: str = "ppo_trainer", config_dir: Path = CONFIG_DIR, program: str = "main_ppo"
) -> DictConfig:
    """Returns the config that a run's task function gets; ``name`` is the config's, ``program`` the main's file."""
    given = [f"hydra.run.dir={folder}", "hydra.output_subdir=null", *overrides]
    with _hydra(config_dir, program) as made:
        config: DictConfig = made.run(name, lambda config: config, given, False).return_value
    return config


def multirun(folder: Path, *overrides: str) -> list[DictConfig]:
    """The configs that the task function of a multirun gets, one per job."""
    seen: list[DictConfig] = []
    given = [f"hydra.sweep.dir={folder}", "hydra.output_subdir=null", *overrides]
    with _hydra(CONFIG_DIR, "main_ppo") as made:
        made.multirun("ppo_trainer", seen.append, given, False)
    return seen


@cache
def _composed(name: str, config_dir: Path, program: str, groups: tuple[str, ...]) -> bytes:
    """Pickles a config composed from choices of groups alone; a copy takes a tenth of the time of ``deepcopy``."""
    given = ["hydra.output_subdir=null", *groups]
    with _hydra(config_dir, program) as made:
        return pickle.dumps(made.compose_config(name, given, run_mode=RunMode.RUN, with_log_configuration=False))


_load = OmegaConf.load


@cache
def _read(file: Path) -> bytes:
    return pickle.dumps(_load(file))


def _given(overrides: tuple[str, ...], name: str, config_dir: Path, program: str) -> DictConfig:
    given = ("actor_rollout_ref.rollout.name=sglang", *overrides)
    groups = tuple(each for each in given if "." not in each.partition("=")[0])
    config: DictConfig = pickle.loads(_composed(name, config_dir, program, groups))
    values = [each for each in given if each not in groups]
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), config)
    OmegaConf.update(config, "hydra.overrides.task", [*groups, *values])
    return config


def config_of(
    *overrides: str, name: str = "ppo_trainer", config_dir: Path = CONFIG_DIR, program: str = "main_ppo"
) -> DictConfig:
    """The config of a run with SGLang; arguments as of ``run``, which takes ten times as long."""
    config = _given(overrides, name, config_dir, program)
    with mock.patch.object(OmegaConf, "load", lambda file: pickle.loads(_read(file))):
        CheckKeys().on_run_start(config)
    return config


def composed(*overrides: str, name: str = "ppo_trainer") -> DictConfig:
    """The same as a program of the user's composes it: no driver has settled anything."""
    config = _given(overrides, name, CONFIG_DIR, "main_ppo")
    with open_dict(config):
        del config.hydra
    return config


def rollout_of(*overrides: str, **choice: Any) -> DictConfig:
    """The rollout config of such a run."""
    rollout: DictConfig = config_of(*overrides, **choice).actor_rollout_ref.rollout
    return rollout


def refused(*overrides: str, **choice: Any) -> str:
    """The one line with which a run ends in the driver."""
    with pytest.raises(SystemExit) as ended:
        config_of(*overrides, **choice)
    text = str(ended.value)
    assert text.startswith("verl-sync-plugin: ") and "\n" not in text, text
    return text
