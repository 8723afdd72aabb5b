# SPDX-License-Identifier: Apache-2.0
"""Loads every hook of the plugin as a process of verl's does, and judges the overrides of a run; Ray is not started.

Runs in a process of its own: ``python -m verl_sync_plugin.cli.probe FILE [OVERRIDE ...]``. It must not import the
plugin's modules before verl had the chance to load them, so each is imported where it is looked at.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_sync_plugin.cli.doctor import Finding, ok, problem, warning

CHECK = "overrides"


class NotActiveError(Exception):
    """A hook is not active; the text says why, ``holder`` who has its place, if anybody."""

    def __init__(self, text: str, holder: str = "") -> None:
        super().__init__(text)
        self.holder = holder


def describe(found: Any) -> str:
    """A class, function or dotted name of a registry, with the distribution that it comes from."""
    name = found if isinstance(found, str) else f"{found.__module__}.{getattr(found, '__qualname__', found)}"
    package = name.partition(".")[0]
    owners = importlib.metadata.packages_distributions().get(package) or [
        point.dist.name
        for point in importlib.metadata.entry_points(group="verl.plugins")
        if point.value.partition(".")[0].partition(":")[0] == package and point.dist is not None
    ]
    return f"{name} (of {owners[0]})" if owners else name


def _expect(found: Any, ours: Any, what: str) -> None:
    if found is None:
        raise NotActiveError(f"{what} is not there")
    if found is not ours and found != ours:
        raise NotActiveError(f"{what} is {describe(found)}", describe(found))


def _ours(where: str) -> Any:
    module, _, name = where.rpartition(".")
    return getattr(importlib.import_module(f"verl_sync_plugin.{module}"), name)


def hydra_keys() -> str:
    from hydra.core.plugins import Plugins
    from hydra.plugins.config_source import ConfigSource
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    for base, mine in ((ConfigSource, "SyncConfigSource"), (SearchPathPlugin, "SyncSearchPath")):
        if _ours(f"config.hydra_source.{mine}") not in Plugins.instance().discover(base):
            raise NotActiveError(f"Hydra does not know {mine}")
    return "keys of the plugin, checks in the driver"


def rollout_config() -> str:
    return str(_ours("hooks.driver.SyncRolloutConfig").__name__)


def training_engines(strategies: tuple[str, ...] = ("fsdp", "fsdp2"), ours: str = "engines.SyncFSDPEngine") -> str:
    import verl.workers.engine  # noqa: F401  (registers)
    from verl.workers.engine.base import EngineRegistry

    mine = _ours(f"hooks.{ours}WithLMHead")
    for strategy in strategies:
        known = EngineRegistry._engines.get("language_model", {}).get(strategy, {})
        for vendor in _ours("trainers.shard_stream.VENDORS"):
            _expect(known.get(("cuda", vendor)), mine, f"verl's training engine for {strategy} on (cuda, {vendor})")
    return ", ".join(strategies)


def megatron_engine() -> str:
    if not importlib.util.find_spec("megatron") or not importlib.util.find_spec("megatron.core"):
        return "not needed: megatron-core is not installed"
    import verl.workers.engine.megatron  # noqa: F401  (registers; verl.workers.engine hides why it could not import it)

    return training_engines(("megatron",), "megatron_engine.SyncMegatronEngine")


def checkpoint_engine() -> str:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    backend = _ours("config.settings.SEPARATE_BACKEND")
    ours = _ours("hooks.separate.SyncCheckpointEngine")
    _expect(CheckpointEngineRegistry._registry.get(backend), ours, f"verl's checkpoint engine {backend}")
    return f"backend {backend}"


def trainers() -> str:
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    ours = _ours("hooks.trainer.SyncTrainerMixin")
    for name, trainer in TRAINER_REGISTRY.items():
        if not (isinstance(trainer, type) and issubclass(trainer, ours)):
            raise NotActiveError(f"verl's trainer {name} is {describe(trainer)}", describe(trainer))
    return ", ".join(sorted(TRAINER_REGISTRY))


def workers() -> str:
    from verl.workers.engine_workers import ActorRolloutRefWorker

    if (ours := _ours("hooks.worker.OURS").get(ActorRolloutRefWorker)) is None:
        raise NotActiveError("there is no worker of ours for verl's ActorRolloutRefWorker")
    return str(ours.__name__)


def llm_client() -> str:
    return str(_ours("hooks.trainer.SeparateLLMServerClient").__name__)


def _rollouts() -> dict[str, Any]:
    return {name: _ours("rollouts.rollout_of")(name) for name in _ours("rollouts.ROLLOUTS")}


def rollout_adapter() -> str:
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    for name, ours in _rollouts().items():
        _expect(_ROLLOUT_REGISTRY.get((name, "async")), ours.ADAPTER, f"verl's rollout adapter for {name}")
        _ours(ours.ADAPTER.partition(".")[2])
    return "for " + ", ".join(_rollouts())


def rollout_replica() -> str:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    for name, ours in _rollouts().items():
        _expect(RolloutReplicaRegistry._registry.get(name), ours.load_replica, f"verl's rollout replica for {name}")
        ours.load_replica()
    return "for " + ", ".join(_rollouts())


def engine_loader() -> str:
    for ours in _rollouts().values():
        importlib.import_module(ours.LOADER)
    return "what the engine calls in a sync"


# In the order in which a run meets them. The engine comes last: its import is the longest, and changes torch.
HOOKS: tuple[Callable[[], str], ...] = (
    hydra_keys, rollout_config, training_engines, megatron_engine, checkpoint_engine, trainers, workers, llm_client,
    rollout_adapter, rollout_replica, engine_loader,
)  # fmt: skip


def probe() -> dict[str, Any]:
    """Imports verl, then looks at every hook. Returns ``verl`` (version and file of what was imported, or an error),
    ``plugin`` (its file, and whether verl loaded it, or the error with which it ended the process) and ``hooks`` (by
    name: active, text, holder)."""
    result: dict[str, Any] = {"verl": {}, "plugin": {"loaded": False}, "hooks": {}}
    spoken = io.StringIO()
    try:
        with contextlib.redirect_stderr(spoken):
            verl = importlib.import_module("verl")
        result["verl"] = {"version": verl.__version__, "file": verl.__file__}
    except BaseException as error:  # the plugin ends the process with SystemExit; its reason is on stderr
        said = [line for line in spoken.getvalue().splitlines() if line.startswith("verl-sync-plugin cannot be loaded")]
        result["plugin" if said else "verl"]["error"] = said[-1] if said else _one_line(error)
        return result
    if "verl_sync_plugin.plugin" in sys.modules:
        result["plugin"].update(loaded=True, file=sys.modules["verl_sync_plugin"].__file__)
        result["hooks"] = {hook.__name__.replace("_", "-"): _look(hook) for hook in HOOKS}
    return result


def _look(hook: Callable[[], str]) -> dict[str, Any]:
    try:
        return {"active": True, "text": hook(), "holder": ""}
    except NotActiveError as error:
        return {"active": False, "text": str(error), "holder": error.holder}
    except BaseException as error:
        first = _first(error)
        frames = [frame.filename for frame in traceback.extract_tb(first.__traceback__)]
        packages = [name.partition("site-packages/")[2].partition("/")[0] for name in frames]
        # What torch refuses is not torch's fault, but of the package that asked for it
        package = next((each for each in reversed(packages) if each and each != "torch"), "")
        missing = getattr(first, "name", "") if isinstance(first, ModuleNotFoundError) else ""
        where = {"missing": missing or "", "file": frames[-1] if frames else "", "package": package}
        cause = " ".join(f"{type(first).__name__}: {first}".split())[:600]
        return {"active": False, "text": _one_line(error), "holder": "", "cause": cause, **where}


def _first(error: BaseException) -> BaseException:
    """The error that all others were raised from: transformers wraps whatever stops an import of its own."""
    while following := error.__cause__ or error.__context__:
        error = following
    return error


def _one_line(error: BaseException) -> str:
    first = _first(error)
    because = f" (because of {type(first).__name__}: {first})" if first is not error else ""
    return " ".join(f"{type(error).__name__}: {error}{because}".split())[:600]


def parse(words: Sequence[str]) -> tuple[str, str, tuple[str, ...]]:
    """Takes a list of overrides apart, or a whole command that was pasted: the file name of the main without ``.py``,
    the name of the config, Hydra's overrides. Raises ValueError with a word that is neither."""
    rest, program, config = iter(words), "main_ppo", "ppo_trainer"
    if "-m" in words:
        rest = iter(words[words.index("-m") + 1 :])
    overrides = []
    for position, word in enumerate(rest):
        option, _, value = word.partition("=")
        if position == 0 and word.endswith(".py"):
            program = Path(word).stem
        elif position == 0 and word.startswith("verl."):
            program = word.rpartition(".")[2]
        elif option in ("--config-name", "-cn"):
            config = value or next(rest, "")
        elif word.startswith("-"):
            raise ValueError(f"{word}: only overrides and --config-name can be checked; leave it out")
        elif "=" in word or word.startswith("~"):
            overrides.append(word)
        else:
            raise ValueError(f"{word}: not an override; use key=value")
    return program, config.removesuffix(".yaml"), tuple(overrides)


def lint(words: Sequence[str]) -> dict[str, Any]:
    """Judges a run with these overrides: ``line`` says who moves the weights, ``findings`` are dictionaries."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    line = ""
    try:
        program, name, overrides = parse(words)
        hydra.version.setbase(None)  # as verl
        GlobalHydra.instance().clear()
        sys.argv = [f"{program}.py"]  # what Hydra names the job after
        configs = str(_ours("config.hydra_source.verl_configs")())
        with hydra.initialize_config_dir(configs, job_name=program, version_base=None):
            line, found = judge(hydra.compose(name, list(overrides)), overrides, program)
    except ValueError as error:
        found = [problem(CHECK, str(error), "see docs/doctor.md")]
    except Exception as error:  # Hydra's and omegaconf's, of which there are many
        text = " ".join(f"{getattr(error, 'override', None) or ''} {error}".split())  # a parse error names none
        found = [
            problem(CHECK, text, "correct the key; one that verl's config does not have is added with a + before it")
        ]
    return {"line": line, "findings": [asdict(each) for each in found]}


def judge(config: Any, overrides: tuple[str, ...], program: str) -> tuple[str, list[Finding]]:
    """Names who moves the weights of a run with this config, and lists what speaks against it: what its driver refuses,
    and what verl's and our checks of the rollout's config refuse in every worker."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from verl.utils.config import omega_conf_to_dataclass

    from verl_sync_plugin.config.settings import KEY_PREFIX, NOT_IN_USE
    from verl_sync_plugin.hooks.driver import OFF, settle
    from verl_sync_plugin.rollouts import ROLLOUTS

    try:
        line = settle(config, overrides, program)
        if line == "weight sync on":
            omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    except OmegaConfBaseException as error:
        return "", [problem(CHECK, " ".join(str(error).split()), "correct the value")]
    except Exception as error:
        return "", [_refused(CHECK, error)]
    if line == OFF:
        return line, [warning(CHECK, line, f"leave out {KEY_PREFIX}.enabled=False for the plugin to move them")]
    if line.startswith(NOT_IN_USE):
        return line, [problem(CHECK, line, "leave that key out, or use another value, for the plugin to move them")]
    if not line:
        key = "actor_rollout_ref.rollout.name"
        text = f"{key}={OmegaConf.select(config, key)}: the plugin does not serve this rollout, stock verl moves its "
        return line, [problem(CHECK, f"{text}weights", f"set {key} to one of: {', '.join(ROLLOUTS)}")]
    return line, [ok(CHECK, line), *check_model(config, overrides)]


def _refused(check: str, error: Exception) -> Finding:
    """A finding of an error. The plugin's refusals end with the remedy: a sentence, or what follows a semicolon."""
    text, remedy = str(error), "correct the value"
    if not isinstance(error, ValueError):
        text = f"{type(error).__name__}: {error}"
    else:
        mark = ". " if text.rpartition(". ")[0] else "; "
        text, _, remedy = text.rpartition(mark) if text.rpartition(mark)[0] else (text, "", remedy)
    return problem(check, " ".join(text.split()), remedy.rstrip("."))


def check_model(config: Any, overrides: Sequence[str]) -> list[Finding]:
    """Says of a composed config whether its model is served, and what a sync of it sends and takes. Its ``config.json``
    has to be on this machine, in a folder or in the cache of the Hugging Face Hub."""
    key, model = "actor_rollout_ref.model.path", config.actor_rollout_ref.model
    path = str(model.get("path"))
    if not any(override.lstrip("+").startswith(f"{key}=") for override in overrides):
        return [ok("model", f"not looked at, for {key} is not given")]
    folder = _folder_of(path)
    if folder is None and path.startswith(("/", "./", "../", "~")):
        return [warning("model", f"{key}={path}: there is no such folder on this machine", "correct the path")]
    if folder is None:
        return [ok("model", f"{key}={path} is not on this machine, so its tensors are not known here")]
    rollout = config.actor_rollout_ref.rollout
    try:
        _ours("rollouts.rollout_of")(rollout.name).refuse_checkpoint(str(folder), model.get("override_config"), rollout)
    except ValueError as error:
        return [_refused("model", error)]
    try:
        return _sent(str(folder), config)
    except Exception as error:  # whatever transformers makes of a config
        text = f"{key}={path}: no model can be built from its config: {_one_line(error)}"
        return [warning("model", text[:400], "is transformers new enough, and is its code transformers' own?")]


def _folder_of(path: str) -> Path | None:
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(path, "config.json")
    except ValueError:  # no name of the Hub's
        return None
    return Path(found).parent if isinstance(found, str) else None


def _sent(folder: str, config: Any) -> list[Finding]:
    """Plans what a sync sends as a run does; no weight is read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from verl_sync_plugin.config.settings import lora_rank_of
    from verl_sync_plugin.trainers.base import wire_policy
    from verl_sync_plugin.trainers.fsdp2 import StateDictSource
    from verl_sync_plugin.trainers.naming import checkpoint_rewrite

    rollout, given = config.actor_rollout_ref.rollout, AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind = AutoModelForImageTextToText if hasattr(given, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        module = kind.from_config(given)
    tied = frozenset(getattr(module, "all_tied_weights_keys", None) or ())
    policy = wire_policy(str(rollout.dtype))
    source = StateDictSource(module.state_dict, policy, checkpoint_rewrite(module), tied)
    megabytes = int(rollout.checkpoint_engine.update_weights_bucket_megabytes)
    plan = source.plan(tuple(shard.base for shard in source.shards()), megabytes << 20)
    model, names = config.actor_rollout_ref.model, given.architectures or [type(module).__name__]
    served = bool(lora_rank_of(model)) and not model.lora.get("merge", False)
    what = "the first sync sends the base, and each an adapter: " if served else "a sync sends "
    sends = f"{plan.tensor_count} tensors, {_size(plan.nbytes)} as {rollout.dtype}, in buckets of {megabytes} MiB"
    found = [ok("model", f"{', '.join(names)} is served; {what}{sends}")]

    tp, pp = (int(rollout.get(f"{each}_model_parallel_size", 1) or 1) for each in ("tensor", "pipeline"))
    each, staging = _size(plan.nbytes / (tp * pp)), _size(2 * max(bucket.nbytes for bucket in plan.buckets))
    takes = f"per GPU about {each} in the engine, and at most {staging} of staging where weights are not read in place"
    if rollout.checkpoint_engine.get("backend", "naive") == "naive" and not served:
        copied = not _ours("rollouts.rollout_of")(rollout.name).covered(names)
        takes += f"; on the host {f'a copy of {each} per GPU' if copied else 'no copy'} while the engine sleeps"
    return [*found, ok("memory", takes)]


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


if __name__ == "__main__":
    (path, *overrides), result = sys.argv[1:], probe()
    if overrides and result["plugin"]["loaded"]:
        result["run"] = lint(overrides)
    Path(path).write_text(json.dumps(result))
