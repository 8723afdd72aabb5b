# SPDX-License-Identifier: Apache-2.0
"""Adds the plugin's keys to Hydra, by its plugin interface: a config source that serves verl's own ``rollout/rollout``
of the installed version with the short bucket key, ``custom.sync`` and a ``_target_`` that validates.

Our default for a key of verl's is an interpolation, which any process can resolve. By it the driver sees that nobody
gave a value, and writes the plain one (``hooks/driver.py``). Ready compositions (``+sync=...``) and the driver's
callback come from the package's ``configs`` folder.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath, SearchPathElement
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from verl_sync_plugin.config.settings import SyncConfig

SCHEME = "verl-sync"
TARGET = "verl_sync_plugin.hooks.driver.SyncRolloutConfig"
CONFIG, PACKAGE = "rollout/rollout", "verl.trainer.config"


def not_given(default: Any) -> str:
    """``default`` as an interpolation, which a value that somebody gives replaces."""
    return f"${{oc.decode:'{default}'}}"


def given(section: Any, key: str, default: Any, resolved: bool = False) -> bool:
    """True if somebody has given ``key``, in a section of a composed config. Once that is ``resolved``, whoever gives
    the default seems to have given nothing."""
    raw: Any = OmegaConf.to_container(section, resolve=False)
    return bool(raw.get(key) != (default if resolved else not_given(default)))


def verl_configs() -> Path:
    spec = find_spec("verl")
    assert spec is not None and spec.origin is not None, "verl loads this plugin, so it can be found"
    return Path(spec.origin).resolve().parent / "trainer" / "config"


def stock_rollout() -> Any:
    """verl's rollout config of the installed version, as a DictConfig."""
    return OmegaConf.load(verl_configs() / f"{CONFIG}.yaml")


def rollout_config() -> Any:
    """verl's rollout config with our keys, as a DictConfig."""
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


class SyncConfigSource(ConfigSource):
    """Serves ``rollout/rollout`` under ``verl-sync://rollout``, and nothing under another path."""

    @staticmethod
    def scheme() -> str:
        return SCHEME

    def available(self) -> bool:
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        config, path = rollout_config(), f"{self.scheme()}://{self.path}"
        config.defaults = ["/hydra/callbacks/verl_sync@_global_.hydra.callbacks.verl_sync", "_self_"]
        return ConfigResult(config=config, path=path, provider=self.provider, header={"package": None})

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", "rollout") and self.path == "rollout"

    def is_config(self, config_path: str) -> bool:
        return self._normalize_file_name(config_path).strip("/") == f"{CONFIG}.yaml" and self.path == "rollout"

    def list(self, config_path: str, results_filter: ObjectType | None = None) -> list[str]:
        # In the group ``rollout`` there is the config ``rollout``
        wanted = ObjectType.CONFIG if config_path.strip("/") else ObjectType.GROUP
        return ["rollout"] if self.is_group(config_path) and results_filter in (None, wanted) else []


class SyncElement(SearchPathElement):
    """Our source in a search path, whose ``elements`` are read only when Hydra makes the sources: it copies the path
    and adds ``hydra.searchpath`` later. A rollout config of the user's own that comes before verl's is used as it is.
    """

    def __init__(self, elements: MutableSequence[SearchPathElement]) -> None:
        self.provider, self.elements = "verl-sync-plugin", elements

    @property
    def path(self) -> str:  # type: ignore[override]
        for each in (element for element in self.elements if not isinstance(element, SyncElement)):
            scheme, _, place = str(each.path).rpartition("://")
            if SourcesRegistry.instance().resolve(scheme or "file")(each.provider, each.path).is_config(CONFIG):
                verls = Path(place).resolve() == verl_configs() or place.replace("/", ".").strip(".") == PACKAGE
                return f"{SCHEME}://{'rollout' if verls else ''}"
        return f"{SCHEME}://rollout"


class SyncSearchPath(SearchPathPlugin):
    """Puts our source before verl's folder, and the ``configs`` folder after it."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        elements = search_path.get_path()
        elements.insert(0, SyncElement(elements))
        package = Path(__file__).resolve().parents[1]
        configs = package / "configs"  # where it is installed; in a source checkout it is next to the package
        search_path.append("verl-sync-plugin", f"file://{configs if configs.is_dir() else package.parent / 'configs'}")
