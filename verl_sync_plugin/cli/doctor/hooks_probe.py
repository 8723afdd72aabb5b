# SPDX-License-Identifier: Apache-2.0
"""Loads every hook of the plugin as a process of verl's does, and writes down which of them are active.

Runs in a process of its own: ``python -m verl_sync_plugin.cli.doctor.hooks_probe FILE [OVERRIDE ...]``. It must not
import the plugin's modules before verl had the chance to load them, so each is imported where it is looked at.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

from verl_sync_plugin.cli.doctor.holders import describe

PLUGIN_MODULE = "verl_sync_plugin.plugin"


class NotActiveError(Exception):
    """A hook is not active; the text says why, ``holder`` who has its place, if anybody."""

    def __init__(self, text: str, holder: str = "") -> None:
        super().__init__(text)
        self.holder = holder


def _expect(found: Any, ours: Any, what: str) -> None:
    if found is ours or found == ours:
        return
    if found is None:
        raise NotActiveError(f"{what} is not there")
    raise NotActiveError(f"{what} is {describe(found)}", describe(found))


def hydra_keys() -> str:
    from hydra.core.plugins import Plugins
    from hydra.plugins.config_source import ConfigSource
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    from verl_sync_plugin.config import hydra_source as ours

    for base, mine in ((ConfigSource, ours.SyncConfigSource), (SearchPathPlugin, ours.SyncSearchPath)):
        if mine not in Plugins.instance().discover(base):
            raise NotActiveError(f"Hydra does not know {mine.__name__}")
    return "keys of the plugin, checks in the driver"


def rollout_config() -> str:
    from verl_sync_plugin.hooks.driver import SyncRolloutConfig

    return SyncRolloutConfig.__name__


def rollout_adapter() -> str:
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    from verl_sync_plugin.compat import MODE
    from verl_sync_plugin.rollouts import ROLLOUTS, rollout_of

    for name in ROLLOUTS:
        ours = rollout_of(name).ADAPTER
        _expect(_ROLLOUT_REGISTRY.get((name, MODE)), ours, f"verl's rollout adapter for {name}")
        module, _, attribute = ours.rpartition(".")
        getattr(importlib.import_module(module), attribute)
    return ", ".join(f"for {name}" for name in ROLLOUTS)


def rollout_replica() -> str:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from verl_sync_plugin.rollouts import ROLLOUTS, rollout_of

    for name in ROLLOUTS:
        ours = rollout_of(name).load_replica
        _expect(RolloutReplicaRegistry._registry.get(name), ours, f"verl's rollout replica for {name}")
        ours()
    return ", ".join(f"for {name}" for name in ROLLOUTS)


def engine_loader() -> str:
    from verl_sync_plugin.rollouts import ROLLOUTS, rollout_of

    for name in ROLLOUTS:
        importlib.import_module(rollout_of(name).LOADER)
    return "what the engine calls in a sync"


def checkpoint_engine() -> str:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    from verl_sync_plugin.config.settings import SEPARATE_BACKEND
    from verl_sync_plugin.hooks.separate import SyncCheckpointEngine

    found = CheckpointEngineRegistry._registry.get(SEPARATE_BACKEND)
    _expect(found, SyncCheckpointEngine, f"verl's checkpoint engine {SEPARATE_BACKEND}")
    return f"backend {SEPARATE_BACKEND}"


def training_engines() -> str:
    import verl.workers.engine  # noqa: F401  (registers)

    from verl_sync_plugin.hooks.engines import SyncFSDPEngineWithLMHead

    _expect_engines(("fsdp", "fsdp2"), SyncFSDPEngineWithLMHead)
    return "fsdp, fsdp2"


def megatron_engine() -> str:
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:  # no "megatron" either
        found = None
    if found is None:
        return "not needed: megatron-core is not installed"
    import verl.workers.engine.megatron  # noqa: F401  (registers; verl.workers.engine hides why it could not import it)

    from verl_sync_plugin.hooks.megatron_engine import SyncMegatronEngineWithLMHead

    _expect_engines(("megatron",), SyncMegatronEngineWithLMHead)
    return "megatron"


def _expect_engines(strategies: tuple[str, ...], ours: type) -> None:
    from verl.workers.engine.base import EngineRegistry

    from verl_sync_plugin.trainers.shard_stream import VENDORS

    for strategy in strategies:
        known = EngineRegistry._engines.get("language_model", {}).get(strategy, {})
        for vendor in VENDORS:
            _expect(known.get(("cuda", vendor)), ours, f"verl's training engine for {strategy} on (cuda, {vendor})")


def trainers() -> str:
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    from verl_sync_plugin.hooks.trainer import SyncTrainerMixin

    for name, trainer in TRAINER_REGISTRY.items():
        if not (isinstance(trainer, type) and issubclass(trainer, SyncTrainerMixin)):
            raise NotActiveError(f"verl's trainer {name} is {describe(trainer)}", describe(trainer))
    return ", ".join(sorted(TRAINER_REGISTRY))


def workers() -> str:
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from verl_sync_plugin.hooks.worker import OURS

    if (ours := OURS.get(ActorRolloutRefWorker)) is None:
        raise NotActiveError("there is no worker of ours for verl's ActorRolloutRefWorker")
    return str(ours.__name__)


def llm_client() -> str:
    from verl_sync_plugin.hooks.trainer import SpanningLLMServerClient

    return SpanningLLMServerClient.__name__


# In the order in which a run meets them. The engine comes last: its import is the longest, and changes torch.
HOOKS: dict[str, Callable[[], str]] = {
    "hydra-keys": hydra_keys,
    "rollout-config": rollout_config,
    "training-engines": training_engines,
    "megatron-engine": megatron_engine,
    "checkpoint-engine": checkpoint_engine,
    "trainers": trainers,
    "workers": workers,
    "llm-client": llm_client,
    "rollout-adapter": rollout_adapter,
    "rollout-replica": rollout_replica,
    "engine-loader": engine_loader,
}


def probe() -> dict[str, Any]:
    """Imports verl, then looks at every hook.

    Returns:
        ``verl`` (version and file of what was imported, or an error), ``plugin`` (file of the plugin, and whether verl
        loaded it, or the error with which it ended the process) and ``hooks`` (by name: active, text, holder).
    """
    result: dict[str, Any] = {"verl": {}, "plugin": {"loaded": False}, "hooks": {}}
    spoken = io.StringIO()
    try:
        with contextlib.redirect_stderr(spoken):
            verl = importlib.import_module("verl")
        result["verl"] = {"version": verl.__version__, "file": verl.__file__}
    except BaseException as error:  # the plugin ends the process with SystemExit; its reason is on stderr
        said = [line for line in spoken.getvalue().splitlines() if line.startswith("verl-sync-plugin cannot be loaded")]
        where = "plugin" if said else "verl"
        result[where]["error"] = said[-1] if said else one_line(error)
        return result
    if PLUGIN_MODULE not in sys.modules:
        return result
    result["plugin"].update(loaded=True, file=sys.modules["verl_sync_plugin"].__file__)
    for name, look in HOOKS.items():
        result["hooks"][name] = _look(look)
    return result


def _look(look: Callable[[], str]) -> dict[str, Any]:
    try:
        return {"active": True, "text": look(), "holder": ""}
    except NotActiveError as error:
        return {"active": False, "text": str(error), "holder": error.holder}
    except BaseException as error:
        return {"active": False, "text": one_line(error), "holder": "", "error": type(error).__name__, **_cause(error)}


def _cause(error: BaseException) -> dict[str, str]:
    """Which module an import failed for, and the file that raised first."""
    inner = _first_of(error)
    frames = traceback.extract_tb(inner.__traceback__)
    missing = getattr(inner, "name", "") if isinstance(inner, ModuleNotFoundError) else ""
    return {"missing": missing or "", "file": frames[-1].filename if frames else ""}


def _first_of(error: BaseException) -> BaseException:
    """The error that all others were raised from: transformers wraps whatever stops an import of its own."""
    while following := error.__cause__ or error.__context__:
        error = following
    return error


def one_line(error: BaseException) -> str:
    """An error and the one that it was raised from, in one line."""
    first = _first_of(error)
    because = f" (because of {type(first).__name__}: {first})" if first is not error else ""
    return " ".join(f"{type(error).__name__}: {error}{because}".split())[:600]


def main(arguments: list[str]) -> int:
    """Writes the result of ``probe`` as JSON into the file that the first argument names; the rest are overrides."""
    (path, *overrides), result = arguments, probe()
    if overrides and result["plugin"]["loaded"]:
        from verl_sync_plugin.cli.doctor.overrides import lint

        result["run"] = lint(overrides)
    with open(path, "w") as file:
        json.dump(result, file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
