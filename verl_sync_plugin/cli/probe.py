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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verl_sync_plugin.cli import doctor
from verl_sync_plugin.cli.doctor import Finding, ok, problem, warning

REINSTALL = "install the plugin again: pip install --force-reinstall --no-deps . in its checkout"
# Where a run meets our hooks: modules whose import calls them, and ours that verl imports by name
HOOKS = {
    "hydra-keys": "hydra",
    "rollout-config": "verl_sync_plugin.hooks.driver",
    "training-engines": "verl.workers.engine",
    "megatron-engine": "verl.workers.engine.megatron",  # whose ImportError verl hides
    "checkpoint-engine": "verl.checkpoint_engine.base",
    "trainers": "verl.trainer.ppo.v1",
    "workers": "verl_sync_plugin.hooks.worker",
}
MAINS = ("verl.trainer.main_ppo", "verl.trainer.main_generation_server")  # of verl's, those whose config is ppo_trainer
OF_THE_ENGINE = ("rollout-adapter", "rollout-replica", "engine-loader")  # hooks that import the rollout engine


def probe(overrides: Sequence[str]) -> dict[str, Any]:
    """Imports verl, then looks at every hook, and at overrides. Returns the ``__version__`` of ``verl``, ``run`` (of
    ``lint``), and ``findings``."""
    result: dict[str, Any] = {"verl": None, "run": None}
    spoken, found, versions = io.StringIO(), list[Finding](), doctor.installed()
    try:
        with contextlib.redirect_stderr(spoken):
            result["verl"] = importlib.import_module("verl").__version__
    except BaseException as error:  # the plugin ends the process with SystemExit; its reason is on stderr
        if said := [line for line in spoken.getvalue().splitlines() if "verl-sync-plugin cannot be loaded" in line]:
            found = [_split("import", said[-1], REINSTALL)]
        elif versions["verl"]:  # where it is not, its version says so
            remedy = "fix that first: python -c 'import verl'"
            found = [problem("import", f"verl cannot be imported: {_one_line(error)}", remedy)]
    else:
        if "verl_sync_plugin.plugin" in sys.modules:
            found = [ok("import", f"importing verl loads {sys.modules['verl_sync_plugin'].__file__}")]
            found += [check_hooks()] if versions["sglang"] else []
            result["run"] = lint(overrides) if overrides else None
        else:
            found = [problem("import", doctor.NOT_LOADED, f"pip install the plugin, and unset {doctor.POLICY}")]
    return {**result, "findings": found}


def check_hooks() -> Finding:
    """Calls every hook. The first failure ends it: what follows mostly fails alike."""
    for name, hook in _hooks():
        try:
            hook()
        except BaseException as error:
            import torch

            platform = os.environ.get(doctor.PLATFORM, "").strip().lower()
            if name in OF_THE_ENGINE and platform != "cpu" and not torch.cuda.is_available():
                text = f"not active: {_one_line(error)}; no GPU is visible here"
                return warning(f"hook/{name}", text, "run the doctor on a node with GPUs")
            return _refused(f"hook/{name}", error, f"make that import work, or {REINSTALL}")
    return ok("hooks", "all hooks of verl and of the engine are ours")


def _hooks() -> Iterator[tuple[str, Callable[[], object]]]:
    """In the order in which a run meets them. The engine's import comes last: it is the longest, and changes torch."""
    has_megatron = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")
    for name, module in HOOKS.items():
        if name != "megatron-engine" or has_megatron:
            yield name, partial(importlib.import_module, module)

    from verl_sync_plugin.compat import MODE
    from verl_sync_plugin.hooks.driver import SyncRolloutConfig
    from verl_sync_plugin.rollouts import ROLLOUTS, rollout_of
    from verl_sync_plugin.trainers.base import refuse_other_engines

    yield "training-engines", refuse_other_engines
    for rollout, engine in ((rollout, rollout_of(rollout)) for rollout in ROLLOUTS):
        yield "rollout-config", partial(SyncRolloutConfig, name=rollout, mode=MODE)  # looks who has the next two
        yield "rollout-adapter", partial(importlib.import_module, engine.ADAPTER.rpartition(".")[0])
        yield "rollout-replica", engine.load_replica
        yield "engine-loader", partial(importlib.import_module, engine.LOADER_MODULE)


def _refused(check: str, error: BaseException, remedy: str) -> Finding:
    from verl_sync_plugin.errors import IncompatibleHostError, RegistryConflictError

    if type(error) in (ValueError, IncompatibleHostError, RegistryConflictError):
        return _split(check, str(error), remedy)
    return problem(check, _one_line(error), remedy)


def _split(check: str, text: str, remedy: str) -> Finding:
    """A finding of a message of the plugin's, whose last sentence is the remedy; ``remedy`` where it has only one."""
    refusal, _, last = text.removesuffix(".").rpartition(". ")
    return problem(check, refusal or text, last if refusal else remedy)


def _one_line(error: BaseException) -> str:
    """With the error that it was raised from in the end: transformers wraps whatever stops an import of its own."""
    first, override = error, getattr(error, "override", None)  # a parse error of Hydra's does not name its override
    while following := first.__cause__ or first.__context__:
        first = following
    because = f" (because of {type(first).__name__}: {first})" if first is not error else ""
    return " ".join(f"{override or type(error).__name__}: {error}{because}".split())[:600]


def program_of(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Splits a whole command that was pasted, or overrides alone: the main as a module, and what follows it."""
    for place, word in enumerate(words):
        if "=" not in word and (word[-3:] in (".py", ".sh") or word[:5] == "verl." or "-m" in words[place - 1 : place]):
            return word.removesuffix(".py").strip("/").replace("/", "."), words[place + 1 :]
    return MAINS[0], words


def lint(words: Sequence[str]) -> dict[str, Any]:
    """Judges a run with these overrides as its driver and its workers do; ``line`` says who moves the weights."""
    import hydra
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    from verl_sync_plugin.config.hydra_source import verl_configs
    from verl_sync_plugin.config.settings import KEY_PREFIX, NOT_IN_USE
    from verl_sync_plugin.hooks.driver import OFF, apply_keys
    from verl_sync_plugin.rollouts import ROLLOUTS

    line, check, key = "", "overrides", "actor_rollout_ref.rollout.name"
    module, words = program_of(words)
    if not any(module.endswith(main) or main.endswith(f".{module}") for main in MAINS):
        remedy = f"to check them with the config of {MAINS[0]}, give them alone, without a program or script"
        text = f"overrides not checked: the config of {module} may be another"
        return {"line": "", "findings": [warning(check, text, remedy)]}
    try:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("--config-path", "-cp", default="config")
        parser.add_argument("--config-name", "-cn", default="ppo_trainer")
        given, overrides = parser.parse_known_args(words)
        if others := [word for word in overrides if word.startswith("-")]:
            raise ValueError(f"{others[0]}: only overrides, --config-path and --config-name are read. Leave it out.")
        program, folder = module.rpartition(".")[2], verl_configs().parent / given.config_path
        with hydra.initialize_config_dir(str(folder), job_name=program, version_base=None):  # as verl
            config = hydra.compose(given.config_name, overrides)
        turned_off = OmegaConf.select(config, f"{KEY_PREFIX}.enabled") is False
        line = apply_keys(config, overrides, program)
        if line.startswith(OFF) and turned_off:
            found = [warning(check, line, f"leave out +sync=stock or {KEY_PREFIX}.enabled=False; then the plugin does")]
        elif line == OFF:
            found = [ok(check, f"{line}, as without the plugin: this run has no weights for the plugin to move")]
        elif line.startswith(OFF):
            found = [warning(check, line, "leave these keys out, which have no effect in this run")]
        elif line.startswith(NOT_IN_USE):
            found = [problem(check, line, "leave that key out, or use another value, for the plugin to move them")]
        elif not line:
            text = f"{key}={OmegaConf.select(config, key)}: the plugin does not serve this rollout, stock verl "
            found = [problem(check, f"{text}moves its weights", f"set {key} to one of: {', '.join(ROLLOUTS)}")]
        else:
            omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
            found = [ok(check, line), *check_model(config, overrides)]
    except Exception as error:
        remedy = "correct key or value; a key that verl's config does not have is added with a + before it, or left out"
        found = [_refused(check, error, remedy)]
    return {"line": line, "findings": found}


def check_model(config: Any, overrides: Sequence[str]) -> list[Finding]:
    """Says of a composed config whether its model is served, and what a sync of it sends and takes. Its ``config.json``
    has to be on this machine, in a folder or in the cache of the Hugging Face Hub."""
    from transformers.utils import cached_file

    from verl_sync_plugin.hooks.driver import model_overrides
    from verl_sync_plugin.rollouts import rollout_of

    key, actor = "actor_rollout_ref.model.path", config.actor_rollout_ref
    path = str(actor.model.get("path"))
    if not any(override.lstrip("+").startswith(f"{key}=") for override in overrides):
        return []
    found = None
    with contextlib.suppress(OSError):
        found = cached_file(os.path.expanduser(path), "config.json", local_files_only=True)
    if found is None:
        if path == "None" or path.startswith(("/", "./", "../", "~")):
            return [warning("model", f"{key}={path}: there is no such folder on this machine", "correct the path")]
        text = f"{key}={path} is not on this machine, so whether it is served is not known here"
        return [warning("model", text, f"hf download {path} config.json, then ask again")]
    folder = os.path.dirname(found)
    try:
        rollout_of(actor.rollout.name).refuse_checkpoint(folder, *model_overrides(actor), actor.rollout)
    except ValueError as error:
        return [_split("model", str(error), "use another model")]
    try:
        return _sent(folder, config)
    except Exception as error:  # whatever transformers makes of a config
        text = f"{key}={path}: no model can be built from its config: {_one_line(error)}"
        return [warning("model", text[:400], "is transformers new enough, and is its code transformers' own?")]


def _sent(folder: str, config: Any) -> list[Finding]:
    """Plans what a sync sends as a run does; no weight is read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from verl_sync_plugin.config.settings import lora_rank_of
    from verl_sync_plugin.layout.planner import plan_buckets
    from verl_sync_plugin.report import size_text
    from verl_sync_plugin.rollouts import rollout_of
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
    plan = plan_buckets(tuple(shard.base for shard in source.shards()), megabytes << 20)
    model, names = config.actor_rollout_ref.model, given.architectures or [type(module).__name__]
    served = bool(lora_rank_of(model)) and not model.lora.get("merge", False)
    what = "the first sync sends the base, and each an adapter: " if served else "a sync sends "
    sends = f"{len(plan.names)} tensors, {size_text(plan.nbytes)} as {rollout.dtype}, in buckets of {megabytes} MiB"
    quantization, merged = rollout.get("quantization", None), bool(lora_rank_of(model)) and not served
    if quantization:
        ends = ("embed_tokens.weight", "lm_head.weight", ".gate.weight")  # the last is a router
        entries = {each.name: each for bucket in plan.buckets for each in bucket.entries}.values()
        matrices = [each.nbytes for each in entries if len(each.shape) == 2 and not each.name.endswith(ends)]
        sends += f"; the engine keeps up to {len(matrices)} of them, {size_text(sum(matrices))}, in {quantization}"

    tp, pp = (int(rollout.get(f"{each}_model_parallel_size", 1) or 1) for each in ("tensor", "pipeline"))
    each, staging = size_text(plan.nbytes / (tp * pp)), size_text(2 * max(bucket.nbytes for bucket in plan.buckets))
    fp8 = bool(quantization)
    takes = f"per GPU about {each} in the engine{' (in fp8 half of it)' * fp8}, and at most {staging} of staging"
    takes += f"{' (twice that in the first sync)' * fp8} where weights are not read in place"
    takes += "; 224 MiB to merge the adapter" * merged
    if rollout.checkpoint_engine.get("backend", "naive") == "naive" and not served:
        engine: Any = rollout_of(rollout.name)
        copied = engine.keeps_copy(names, engine.engine_arguments(rollout))
        takes += f"; on the host {f'a copy of {each} per GPU' if copied else 'no copy'} while the engine sleeps"
    return [ok("model", f"{', '.join(names)} is served; {what}{sends}"), ok("memory", takes)]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(probe(sys.argv[2:])))
