# SPDX-License-Identifier: Apache-2.0
"""The Hydra plugin classes; imported only where Hydra is in use."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_sync_plugin.config import hydra_source
from verl_sync_plugin.config.settings import KEY_PREFIX, NOT_IN_USE
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
            config = OmegaConf.create({"_target_": "verl_sync_plugin.hooks.hydra_plugins.CheckKeys"})
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
    """Settles our keys in the driver, before Ray starts; see ``hooks/driver.py``.

    Hazard: Hydra turns an exception of a callback into a warning and goes on, so everything leaves as ``SystemExit``.
    """

    def __init__(self) -> None:
        self._settled = False

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with _end_the_driver():
            _say_who(_settle(config))
        self._settled = True

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Checks the config of a multirun's job; the task has a copy of it already, so nothing can be changed here."""
        if self._settled:
            return
        with _end_the_driver():
            settled = copy.deepcopy(config)
            _say_who(line := _settle(settled))
            _refuse_unsettled(config, settled, line)


def _say_who(line: str) -> None:
    if line:
        say(f"driver: {line}")


def _settle(config: DictConfig) -> str:
    from verl_sync_plugin.hooks.driver import settle

    overrides: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    return settle(config, overrides, str(OmegaConf.select(config, "hydra.job.name")))


def _refuse_unsettled(config: DictConfig, settled: DictConfig, line: str) -> None:
    """Refuses a multirun's config that needs settling where no V1 trainer will settle it (``hooks/trainer.py``).

    Raises:
        ValueError: names what to give on the command line instead.
    """
    if OmegaConf.select(config, "trainer.use_v1") is True and OmegaConf.select(config, "hydra.job.name") == "main_ppo":
        return
    todo = [f"{KEY_PREFIX}.enabled=False"] if line.startswith(NOT_IN_USE) else []
    if (wanted := OmegaConf.select(settled, "actor_rollout_ref.model")) is not None:
        for key in (*(key for key in wanted if key != "lora"), "lora.peft"):
            value = OmegaConf.select(wanted, key)
            if value != OmegaConf.select(config, f"actor_rollout_ref.model.{key}"):
                todo.append(f"++actor_rollout_ref.model.{key}={value}")
    if todo:
        raise ValueError(
            f"--multirun without verl's V1 trainers: add {' '.join(todo)}, which cannot be set for you here."
        )


@contextmanager
def _end_the_driver() -> Iterator[None]:
    """Ends the process with one line, whatever is raised inside."""
    try:
        yield
    except Exception as error:
        # Some of omegaconf's exceptions are ValueErrors, but have no remedy
        if isinstance(error, ValueError) and not isinstance(error, OmegaConfBaseException):
            raise SystemExit(f"verl-sync-plugin: {error}") from error
        what = " ".join(f"cannot check the keys of this run: {type(error).__name__}: {error}".split())
        raise SystemExit(
            f"verl-sync-plugin: {what}. Correct the value, or set VERL_USE_EXTERNAL_PLUGINS=none to run verl without "
            "plugins."
        ) from error


def register() -> None:
    """Registers config source and search path with Hydra; harmless when done before."""
    Plugins.instance().register(SyncConfigSource)
    Plugins.instance().register(SyncSearchPath)
