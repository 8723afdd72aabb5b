"""Teaches Hydra our keys: a config source that serves verl's own rollout config with our fields added.

Registered through Hydra's documented plugin interface. The source claims one config, ``rollout/rollout``; it loads
verl's YAML of the installed version and adds the short bucket key, ``custom.sync`` and a ``_target_`` that validates.
Ready compositions (``+sync=...``) come from the package's ``configs`` folder.
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl_sync_plugin.bucket_size import AUTO, DEFAULT_MEGABYTES
from verl_sync_plugin.config import SyncConfig

SCHEME = "verl-sync"
BUCKET_RESOLVER = "verl_sync_bucket"
CONFIG = "rollout/rollout"
CALLBACK_CONFIG = "hydra/callbacks/verl_sync"


def configs_folder() -> Path:
    """The folder with ``sync/*.yaml``: inside the installed package, or beside it in a source checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def bucket_default(short: int | str | None, stock: int, *, _parent_: Any) -> int | str:
    """Resolver of the long key: the short key where it is given, else ours where the plugin syncs, else verl's.

    ``auto`` is ours, and verl reads a number here, so with it this is what it is without the short key.
    """
    if short is not None and short != AUTO:
        return short
    from omegaconf import OmegaConf

    rollout = _parent_._get_parent()
    syncs = OmegaConf.select(rollout, "custom.sync.enabled", default=False)
    name = OmegaConf.select(rollout, "name", default=None, throw_on_missing=False)
    return min(stock, DEFAULT_MEGABYTES) if syncs is True and name == "sglang" else stock


def verl_configs() -> Path:
    """The folder of verl's own configs."""
    spec = find_spec("verl")
    assert spec is not None and spec.origin is not None, "verl loads this plugin, so it can be found"
    return Path(spec.origin).resolve().parent / "trainer" / "config"


def rollout_config() -> Any:
    """verl's rollout config with our keys, as a DictConfig."""
    from omegaconf import OmegaConf

    config: Any = OmegaConf.load(verl_configs() / f"{CONFIG}.yaml")
    stock = config.checkpoint_engine.update_weights_bucket_megabytes
    config.update_weights_bucket_megabytes = None
    config.checkpoint_engine.update_weights_bucket_megabytes = (
        f"${{{BUCKET_RESOLVER}:${{..update_weights_bucket_megabytes}},{stock}}}"
    )
    config.multi_stage_wake_up = True
    defaults = {key: list(value) if isinstance(value, tuple) else value for key, value in _defaults().items()}
    config.custom = OmegaConf.merge(config.get("custom") or {}, {"sync": defaults})
    # An unknown key must reach our check, whose error names the known ones; Hydra's would advise to add it with "+"
    OmegaConf.set_struct(config.custom.sync, False)
    config._target_ = "verl_sync_plugin.rollout_config.SyncRolloutConfig"
    return config


def _defaults() -> dict[str, Any]:
    return dataclasses.asdict(SyncConfig())


def register() -> None:
    """Registers resolver, config source and search path with Hydra; harmless when done before."""
    from omegaconf import OmegaConf

    if OmegaConf.has_resolver(BUCKET_RESOLVER):
        return
    OmegaConf.register_new_resolver(BUCKET_RESOLVER, bucket_default)
    from hydra.core.plugins import Plugins

    from verl_sync_plugin import hydra_plugins

    Plugins.instance().register(hydra_plugins.SyncConfigSource)
    Plugins.instance().register(hydra_plugins.SyncSearchPath)
