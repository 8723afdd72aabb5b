# SPDX-License-Identifier: Apache-2.0
"""Loads every hook of the plugin as a process of verl's does, and judges the overrides of a run, without Ray.

``python -m verl_sync_plugin.cli.probe FILE [OVERRIDE ...]`` is a process of its own. It must not import the plugin's
modules before verl had the chance to load them, so each is imported where it is looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from verl_sync_plugin.cli import doctor
from verl_sync_plugin.cli.doctor import Finding, ok, problem, warning

REINSTALL = "install the plugin again: pip install --force-reinstall --no-deps . in its checkout"
OTHER_PLUGIN = f"uninstall one of the two plugins, or leave the other one out: {doctor.POLICY}={doctor.POINT}"
NOT_THERE = "not there"
Entry = tuple[str, Any, Any]  # of a registry of verl's: its name, what it holds, and what it should


def _ours(where: str) -> Any:
    module, _, name = where.rpartition(".")
    return getattr(importlib.import_module(f"verl_sync_plugin.{module}"), name)


def hydra_keys() -> Iterator[Entry]:
    from hydra.core.plugins import Plugins
    from hydra.plugins.config_source import ConfigSource
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    for base, name in ((ConfigSource, "SyncConfigSource"), (SearchPathPlugin, "SyncSearchPath")):
        ours = _ours(f"config.hydra_source.{name}")
        yield f"Hydra's {name}", ours if ours in Plugins.instance().discover(base) else None, ours


def training_engines(strategies: tuple[str, ...], ours: str) -> Iterator[Entry]:
    import verl.workers.engine  # noqa: F401  (registers)
    from verl.workers.engine.base import EngineRegistry

    for strategy in strategies:
        known = EngineRegistry._engines.get("language_model", {}).get(strategy, {})
        for vendor in _ours("trainers.base.VENDORS"):
            name = f"verl's training engine for {strategy} on (cuda, {vendor})"
            yield name, known.get(("cuda", vendor)), _ours(f"hooks.{ours}EngineWithLMHead")


def megatron_engine() -> Iterator[Entry]:
    if importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core"):
        import verl.workers.engine.megatron  # noqa: F401  (registers; verl hides why it could not import it)

        yield from training_engines(("megatron",), "megatron_engine.SyncMegatron")


def checkpoint_engine() -> Iterator[Entry]:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    backend, ours = _ours("config.settings.SEPARATE_BACKEND"), _ours("hooks.separate.SyncCheckpointEngine")
    yield f"verl's checkpoint engine {backend}", CheckpointEngineRegistry._registry.get(backend), ours


def trainers() -> Iterator[Entry]:
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    ours = _ours("hooks.trainer.SyncTrainerMixin")
    for name, found in TRAINER_REGISTRY.items():
        yield f"verl's trainer {name}", found, found if isinstance(found, type) and issubclass(found, ours) else ours


def _rollouts() -> list[tuple[str, Any]]:
    return [(name, _ours("rollouts.rollout_of")(name)) for name in _ours("rollouts.ROLLOUTS")]


def rollout_adapter() -> Iterator[Entry]:
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    for name, ours in _rollouts():
        yield f"verl's rollout adapter for {name}", _ROLLOUT_REGISTRY.get((name, "async")), ours.ADAPTER
        _ours(ours.ADAPTER.partition(".")[2])


def rollout_replica() -> Iterator[Entry]:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    for name, ours in _rollouts():
        yield f"verl's rollout replica for {name}", RolloutReplicaRegistry._registry.get(name), ours.load_replica
        ours.load_replica()


def engine_loader() -> tuple[()]:
    for _, ours in _rollouts():
        importlib.import_module(ours.LOADER)
    return ()


# In the order in which a run meets them. The engine comes last: its import is the longest, and changes torch.
HOOKS: dict[str, Callable[[], Iterable[Entry]]] = {
    "hydra-keys": hydra_keys,
    "rollout-config": lambda: _ours("hooks.driver.SyncRolloutConfig") and (),
    "training-engines": partial(training_engines, ("fsdp", "fsdp2"), "engines.SyncFSDP"),
    "megatron-engine": megatron_engine,
    "checkpoint-engine": checkpoint_engine,
    "trainers": trainers,
    "workers": lambda: _ours("hooks.worker.OURS") and (),
    "rollout-adapter": rollout_adapter,
    "rollout-replica": rollout_replica,
    "engine-loader": engine_loader,
}
OF_THE_ENGINE = {"rollout-adapter", "rollout-replica", "engine-loader"}  # hooks that import the rollout engine


def probe(overrides: Sequence[str]) -> dict[str, Any]:
    """Imports verl, then looks at every hook, and at overrides. Returns the ``__version__`` of ``verl``, ``run`` (of
    ``lint``), and ``findings``."""
    result: dict[str, Any] = {"verl": None, "run": None}
    spoken, found = io.StringIO(), list[Finding]()
    try:
        with contextlib.redirect_stderr(spoken):
            result["verl"] = importlib.import_module("verl").__version__
    except BaseException as error:  # the plugin ends the process with SystemExit; its reason is on stderr
        if said := [line for line in spoken.getvalue().splitlines() if "verl-sync-plugin cannot be loaded" in line]:
            found = [problem("import", said[-1], _known_remedy(said[-1]) or REINSTALL)]
        elif doctor.installed()["verl"]:  # where it is not, its version says so
            remedy = "mend that first: python -c 'import verl'"
            found = [problem("import", f"verl cannot be imported: {_one_line(error)}", remedy)]
    else:
        if "verl_sync_plugin.plugin" in sys.modules:
            loaded = ok("import", f"importing verl loads {sys.modules['verl_sync_plugin'].__file__}")
            found = [loaded, *check_hooks(HOOKS, doctor.installed())]
            result["run"] = lint(overrides) if overrides else None
        else:
            found = [problem("import", doctor.NOT_LOADED, f"pip install the plugin, and unset {doctor.POLICY}")]
    return {**result, "findings": [asdict(each) for each in found]}


def check_hooks(hooks: Mapping[str, Callable[[], Iterable[Entry]]], versions: doctor.Versions) -> Iterator[Finding]:
    """One finding where all hooks are active; else one of each cause that keeps some from being so. A package that is
    not installed is none: its version says so."""
    active, alike = 0, dict[str, tuple[BaseException, list[str]]]()
    for name, hook in hooks.items():
        try:
            wrong = [f"{what} is {describe(found)}" for what, found, ours in hook() if found != ours]
        except BaseException as error:
            first = _first(error)
            alike.setdefault(f"{type(first).__name__}: {first}", (error, []))[1].append(name)
        else:
            active += not wrong
            if wrong:
                remedy = REINSTALL if any(each.endswith(NOT_THERE) for each in wrong) else OTHER_PLUGIN
                yield problem(f"hook/{name}", "; ".join(wrong), remedy)
    for cause, names in alike.values():
        first = _first(cause)
        package = str(first.name).partition(".")[0] if isinstance(first, ModuleNotFoundError) and first.name else ""
        if package not in doctor.RANGES or versions[package] is not None:
            yield _failed(cause, names, package)
    if active == len(hooks):
        yield ok("hooks", f"{active} hooks of verl and SGLang are ours")


def describe(found: Any) -> str:
    """A class, function or dotted name of a registry, with the distribution that it comes from."""
    if found is None:
        return NOT_THERE
    name = found if isinstance(found, str) else f"{found.__module__}.{getattr(found, '__qualname__', found)}"
    package = name.partition(".")[0]
    owners = importlib.metadata.packages_distributions().get(package) or [
        point.dist.name
        for point in importlib.metadata.entry_points(group="verl.plugins")
        if point.value.partition(".")[0].partition(":")[0] == package and point.dist is not None
    ]
    return f"{name} (of {owners[0]})" if owners else name


def _failed(error: BaseException, names: list[str], missing: str) -> Finding:
    """A finding of hooks that cannot be imported, for want of a package if it names one."""
    check, also = f"hook/{names[0]}", f", nor {', '.join(names[1:])}" if names[1:] else ""
    text = f"not active{also}: {_one_line(error)}"
    files = [frame.filename for frame in traceback.extract_tb(_first(error).__traceback__)]
    packages = [name.partition("site-packages/")[2].partition("/")[0] for name in files]
    # What torch refuses is not torch's fault, but of the package that asked for it
    package = next((each for each in reversed(packages) if each and each != "torch"), "")
    if OF_THE_ENGINE.issuperset(names):
        import torch

        if not torch.cuda.is_available() and os.environ.get(doctor.PLATFORM, "").strip().lower() != "cpu":
            return warning(check, f"{text}; no GPU is visible here", "run the doctor on a node with GPUs")
    if missing and missing != "verl_sync_plugin":
        remedy = f"install what {missing!r} belongs to"
    elif files and "verl_sync_plugin" in files[-1]:
        remedy = REINSTALL
    elif package:
        remedy = f"install a {package} that fits the torch here: python -c 'import {package}' has to work"
    else:
        remedy = f"mend {files[-1] if files else 'it'} first"
    return problem(check, text, _known_remedy(text) or remedy)


def _known_remedy(text: str) -> str:
    if "already taken" in text or "already registed" in text:
        return OTHER_PLUGIN
    return "pip install verl==0.9.1, which the plugin is made for" if "does not offer" in text else ""


def _first(error: BaseException) -> BaseException:
    """The error that all others were raised from: transformers wraps whatever stops an import of its own."""
    while following := error.__cause__ or error.__context__:
        error = following
    return error


def _one_line(error: BaseException) -> str:
    first = _first(error)
    because = f" (because of {type(first).__name__}: {first})" if first is not error else ""
    return " ".join(f"{type(error).__name__}: {error}{because}".split())[:600]


def parse(words: Sequence[str]) -> tuple[str, str, list[str]]:
    """Reads a list of overrides, or a whole command that was pasted: file name of the main without ``.py``, name of the
    config, Hydra's overrides. Raises ValueError for another option."""
    rest, program = list(words[words.index("-m") + 1 :] if "-m" in words else words), "main_ppo"
    if rest and (rest[0].startswith("verl.") or rest[0].endswith(".py")):
        program = rest.pop(0).removesuffix(".py").replace("/", ".").rpartition(".")[2]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-name", "-cn", default="ppo_trainer")
    given, overrides = parser.parse_known_args(rest)
    if options := [word for word in overrides if word.startswith("-")]:
        raise ValueError(f"{options[0]}: only overrides and --config-name can be checked. Leave it out.")
    return program, given.config_name.removesuffix(".yaml"), overrides


def lint(words: Sequence[str]) -> dict[str, Any]:
    """Judges a run with these overrides as its driver and its workers do; ``line`` says who moves the weights."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from verl.utils.config import omega_conf_to_dataclass

    from verl_sync_plugin.config.settings import KEY_PREFIX, NOT_IN_USE
    from verl_sync_plugin.hooks.driver import OFF, settle
    from verl_sync_plugin.rollouts import ROLLOUTS

    line, check, key = "", "overrides", "actor_rollout_ref.rollout.name"
    try:
        program, name, overrides = parse(words)
        hydra.version.setbase(None)  # as verl
        GlobalHydra.instance().clear()
        sys.argv = [f"{program}.py"]  # what Hydra names the job after
        configs = str(_ours("config.hydra_source.verl_configs")())
        with hydra.initialize_config_dir(configs, job_name=program, version_base=None):
            config = hydra.compose(name, overrides)
        line = settle(config, overrides, program)
        if line == OFF:
            found = [warning(check, line, f"leave out {KEY_PREFIX}.enabled=False for the plugin to move them")]
        elif line.startswith(NOT_IN_USE):
            found = [problem(check, line, "leave that key out, or use another value, for the plugin to move them")]
        elif not line:
            text = f"{key}={config.actor_rollout_ref.rollout.name}: the plugin does not serve this rollout, stock verl "
            found = [problem(check, f"{text}moves its weights", f"set {key} to one of: {', '.join(ROLLOUTS)}")]
        else:
            omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
            found = [ok(check, line), *check_model(config, overrides)]
    except Exception as error:
        found = [_refused(check, error)]
    return {"line": line, "findings": [asdict(each) for each in found]}


def _refused(check: str, error: Exception) -> Finding:
    """A finding of an error, whose last sentence is the remedy where it is the plugin's."""
    text = " ".join(f"{getattr(error, 'override', None) or ''} {error}".split())  # a parse error of Hydra's names none
    refusal, _, remedy = text.removesuffix(".").rpartition(". ")
    if type(error) is ValueError and refusal:
        return problem(check, refusal, remedy)
    return problem(
        check, text, "correct key or value; a key that verl's config does not have is added with a + before it"
    )


def check_model(config: Any, overrides: Sequence[str]) -> list[Finding]:
    """Says of a composed config whether its model is served, and what a sync of it sends and takes. Its ``config.json``
    has to be on this machine, in a folder or in the cache of the Hugging Face Hub."""
    key, actor = "actor_rollout_ref.model.path", config.actor_rollout_ref
    path = str(actor.model.get("path"))
    if not any(override.lstrip("+").startswith(f"{key}=") for override in overrides):
        return []
    if (folder := _folder_of(path)) is None:
        if path.startswith(("/", "./", "../", "~")):
            return [warning("model", f"{key}={path}: there is no such folder on this machine", "correct the path")]
        text = f"{key}={path} is not on this machine, so whether it is served is not known here"
        return [warning("model", text, f"hf download {path} config.json, then ask again")]
    try:
        engine = _ours("rollouts.rollout_of")(actor.rollout.name)
        engine.refuse_checkpoint(folder, actor.model.get("override_config"), actor.rollout)
    except ValueError as error:
        return [_refused("model", error)]
    try:
        return _sent(folder, config)
    except Exception as error:  # whatever transformers makes of a config
        text = f"{key}={path}: no model can be built from its config: {_one_line(error)}"
        return [warning("model", text[:400], "is transformers new enough, and is its code transformers' own?")]


def _folder_of(path: str) -> str | None:
    from transformers.utils import cached_file

    with contextlib.suppress(OSError):
        if found := cached_file(os.path.expanduser(path), "config.json", local_files_only=True):
            return os.path.dirname(found)
    return None


def _sent(folder: str, config: Any) -> list[Finding]:
    """Plans what a sync sends as a run does; no weight is read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from verl_sync_plugin.config.settings import lora_rank_of
    from verl_sync_plugin.report import size_text
    from verl_sync_plugin.trainers.base import wire_policy
    from verl_sync_plugin.trainers.fsdp2 import StateDictSource
    from verl_sync_plugin.trainers.naming import Naming, checkpoint_rewrite, unsaved_of

    rollout, given = config.actor_rollout_ref.rollout, AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind = AutoModelForImageTextToText if hasattr(given, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        module = kind.from_config(given)
    naming = Naming(wire_policy(str(rollout.dtype)), checkpoint_rewrite(module), unsaved=unsaved_of(module))
    source = StateDictSource(module.state_dict, naming)
    megabytes = int(rollout.checkpoint_engine.update_weights_bucket_megabytes)
    plan = source.plan(tuple(shard.base for shard in source.shards()), megabytes << 20)
    model, names = config.actor_rollout_ref.model, given.architectures or [type(module).__name__]
    served = bool(lora_rank_of(model)) and not model.lora.get("merge", False)
    what = "the first sync sends the base, and each an adapter: " if served else "a sync sends "
    sends = f"{len(plan.names)} tensors, {size_text(plan.nbytes)} as {rollout.dtype}, in buckets of {megabytes} MiB"
    if quantization := rollout.get("quantization", None):
        sends += f"; in the first sync the engine says which of them it keeps in {quantization}"

    tp, pp = (int(rollout.get(f"{each}_model_parallel_size", 1) or 1) for each in ("tensor", "pipeline"))
    each, staging = size_text(plan.nbytes / (tp * pp)), size_text(2 * max(bucket.nbytes for bucket in plan.buckets))
    takes = f"per GPU about {each} in the engine, and at most {staging} of staging where weights are not read in place"
    if rollout.checkpoint_engine.get("backend", "naive") == "naive" and not served:
        engine = _ours("rollouts.rollout_of")(rollout.name)
        copied = engine.keeps_copy(names, engine.engine_arguments(rollout))
        takes += f"; on the host {f'a copy of {each} per GPU' if copied else 'no copy'} while the engine sleeps"
    return [ok("model", f"{', '.join(names)} is served; {what}{sends}"), ok("memory", takes)]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(probe(sys.argv[2:])))
