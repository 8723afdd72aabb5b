# SPDX-License-Identifier: Apache-2.0
"""Adds the plugin's keys to Hydra: a config source that serves verl's own rollout config with more fields.

Registered through Hydra's documented plugin interface. The source claims one config, ``rollout/rollout``; it loads
verl's YAML of the installed version and adds the short bucket key, ``custom.sync`` and a ``_target_`` that validates.
What becomes of a default of ours on a key of verl's is settled in the driver (``hooks/driver.py``); until then the
value is an interpolation that says that nobody has given one, and that every process can resolve.
Ready compositions (``+sync=...``) come from the package's ``configs`` folder.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from verl_sync_plugin.config.settings import SyncConfig

SCHEME = "verl-sync"
PREFIX = "actor_rollout_ref.rollout"
TARGET = "verl_sync_plugin.hooks.rollout_config.SyncRolloutConfig"
CONFIG = "rollout/rollout"
CALLBACK_CONFIG = "hydra/callbacks/verl_sync"


def configs_folder() -> Path:
    """The folder with ``sync/*.yaml``: inside the installed package, or beside it in a source checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def not_given(default: Any) -> str:
    """``default`` as an interpolation, which a value that somebody gives replaces."""
    return f"${{oc.decode:'{default}'}}"


def given(section: Any, key: str, default: Any) -> bool:
    """Whether somebody has given ``key``, in a section of a composed config of which nothing is resolved yet."""
    from omegaconf import OmegaConf

    raw: Any = OmegaConf.to_container(section, resolve=False)
    return bool(raw[key] != not_given(default))


def verl_configs() -> Path:
    """The folder of verl's own configs."""
    spec = find_spec("verl")
    assert spec is not None and spec.origin is not None, "verl loads this plugin, so it can be found"
    return Path(spec.origin).resolve().parent / "trainer" / "config"


def stock_rollout() -> Any:
    """verl's rollout config of the installed version, as a DictConfig."""
    from omegaconf import OmegaConf

    return OmegaConf.load(verl_configs() / f"{CONFIG}.yaml")


def rollout_config() -> Any:
    """verl's rollout config with our keys, as a DictConfig."""
    from omegaconf import OmegaConf

    config = stock_rollout()
    engine = config.checkpoint_engine
    engine.update_weights_bucket_megabytes = not_given(engine.update_weights_bucket_megabytes)
    config.update_weights_bucket_megabytes = None
    config.multi_stage_wake_up = not_given(True)
    config.custom = OmegaConf.merge(config.get("custom") or {}, {"sync": msgspec.structs.asdict(SyncConfig())})
    # An unknown key must reach our check, whose error names the known ones; Hydra's would advise to add it with "+"
    OmegaConf.set_struct(config.custom.sync, False)
    config._target_ = TARGET
    return config
