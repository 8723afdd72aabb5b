"""The Hydra plugin classes; imported only where Hydra is in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.experimental.callback import Callback
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from verl_sync_plugin import hydra_source
from verl_sync_plugin.config import sync_config_of
from verl_sync_plugin.log import say


class SyncConfigSource(ConfigSource):
    """Serves ``rollout/rollout`` under the scheme ``verl-sync://``."""

    @staticmethod
    def scheme() -> str:
        return hydra_source.SCHEME

    def available(self) -> bool:
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        if self._is_callback(config_path):
            config = OmegaConf.create({"_target_": "verl_sync_plugin.hydra_plugins.CheckKeys"})
            header: dict[str, Any] = {"package": "hydra.callbacks.verl_sync"}
        else:
            config = hydra_source.rollout_config()
            config.defaults = [{"/hydra/callbacks@_global_.hydra.callbacks.verl_sync": "verl_sync"}, "_self_"]
            header = {"package": None}
        return ConfigResult(config=config, path=f"{self.scheme()}://{self.path}", provider=self.provider, header=header)

    def _is_callback(self, config_path: str) -> bool:
        return self._normalize_file_name(config_path).strip("/") == f"{hydra_source.CALLBACK_CONFIG}.yaml"

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", "rollout", "hydra", "hydra/callbacks")

    def is_config(self, config_path: str) -> bool:
        name = self._normalize_file_name(config_path).strip("/")
        return name in (f"{hydra_source.CONFIG}.yaml", f"{hydra_source.CALLBACK_CONFIG}.yaml")

    def list(self, config_path: str, results_filter: ObjectType | None = None) -> list[str]:
        folder = config_path.strip("/")
        groups = {"": ["rollout", "hydra"], "hydra": ["callbacks"]}
        configs = {"rollout": ["rollout"], "hydra/callbacks": ["verl_sync"]}
        found: list[str] = []
        if results_filter in (None, ObjectType.GROUP):
            found += groups.get(folder, [])
        if results_filter in (None, ObjectType.CONFIG):
            found += configs.get(folder, [])
        return found


def _own_rollout(path: str | None) -> bool:
    """Whether a folder of the user's own holds a rollout config; that one is used as it is."""
    folder = Path((path or "").removeprefix("file://"))
    return (folder / f"{hydra_source.CONFIG}.yaml").is_file() and folder.resolve() != hydra_source.verl_configs()


class SyncSearchPath(SearchPathPlugin):
    """Puts our source before verl's folder, and the ready compositions after it."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if not any(_own_rollout(element.path) for element in search_path.get_path()):
            search_path.prepend("verl-sync-plugin", f"{hydra_source.SCHEME}://rollout")
        search_path.append("verl-sync-plugin", f"file://{hydra_source.configs_folder()}")


class CheckKeys(Callback):
    """Checks our keys in the driver, before Ray starts.

    Hazard: Hydra turns an exception of a callback into a warning, so a wrong key leaves as ``SystemExit``.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._check(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._check(config)

    @staticmethod
    def _check(config: DictConfig) -> None:
        rollout = OmegaConf.select(config, "actor_rollout_ref.rollout")
        if rollout is None:
            return
        from verl_sync_plugin.driver import settle_trainer
        from verl_sync_plugin.rollout_config import check_rollout

        try:
            check_rollout(rollout)
            settle_trainer(config.actor_rollout_ref)
        except ValueError as error:
            raise SystemExit(f"verl-sync-plugin: {error}") from error
        if rollout.get("name") == "sglang":
            state = "on" if sync_config_of(rollout).enabled else "off, stock verl moves the weights"
            say(f"driver: weight sync {state}")
