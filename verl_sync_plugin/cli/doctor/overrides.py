# SPDX-License-Identifier: Apache-2.0
"""The overrides of a run, composed with verl's own config and refused by what the driver refuses; Ray is not started.

``lint`` runs in the process of ``hooks_probe``, where verl has loaded the plugin or has not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_sync_plugin.cli.doctor.findings import Finding, ok, problem, warning
from verl_sync_plugin.cli.doctor.model import check_model

CHECK = "overrides"
KEY_REMEDY = "correct the key; one that verl's config does not have is added with a + before it"


@dataclass(frozen=True)
class Command:
    """A command line of a run, taken apart.

    Attributes:
        program: the file name of the main, without ``.py``.
        config: name of the config.
        overrides: Hydra's.
    """

    program: str
    config: str
    overrides: tuple[str, ...]


def parse(words: Sequence[str]) -> Command:
    """Takes a list of overrides apart, or a whole command that was pasted.

    Raises:
        ValueError: a word is neither; names it.
    """
    rest, program, config = list(words), "main_ppo", "ppo_trainer"
    if "-m" in rest:
        rest = rest[rest.index("-m") + 1 :]
    if rest and (rest[0].startswith("verl.") or rest[0].endswith(".py")):
        program = Path(rest.pop(0)).stem if rest[0].endswith(".py") else rest.pop(0).rpartition(".")[2]
    overrides = []
    while rest:
        word = rest.pop(0)
        option, _, value = word.partition("=")
        if option in ("--config-name", "-cn"):
            config = value or (rest.pop(0) if rest else "")
        elif word.startswith("-"):
            raise ValueError(f"{word}: only overrides and --config-name can be checked; leave it out")
        elif "=" in word or word.startswith("~"):
            overrides.append(word)
        else:
            raise ValueError(f"{word}: not an override; use key=value")
    return Command(program, config.removesuffix(".yaml"), tuple(overrides))


def lint(words: Sequence[str]) -> dict[str, Any]:
    """What a run with these overrides would be told.

    Returns:
        ``line``: who moves the weights; ``findings``: as dictionaries; ``gpus_per_node`` where it is known.
    """
    try:
        command = parse(words)
        config = compose(command)
    except ValueError as error:
        return {"line": "", "findings": [problem(CHECK, str(error), "see docs/doctor.md").as_dict()]}
    except Exception as error:  # Hydra's and omegaconf's, of which there are many
        text = " ".join(f"{getattr(error, 'override', None) or ''} {error}".split())  # a parse error names none
        return {"line": "", "findings": [problem(CHECK, text, KEY_REMEDY).as_dict()]}
    line, found = judge(config, command)
    gpus = (config.get("trainer") or {}).get("n_gpus_per_node")
    return {"line": line, "findings": [each.as_dict() for each in found], "gpus_per_node": gpus}


def compose(command: Command) -> Any:
    """The config that the driver's main would be given, but for what the plugin settles."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    from verl_sync_plugin.config.hydra_source import verl_configs

    hydra.version.setbase(None)  # as verl
    GlobalHydra.instance().clear()
    sys.argv = [f"{command.program}.py"]  # what Hydra names the job after
    with hydra.initialize_config_dir(str(verl_configs()), job_name=command.program, version_base=None):
        return hydra.compose(command.config, list(command.overrides))


def judge(config: Any, command: Command) -> tuple[str, list[Finding]]:
    """Who moves the weights of a run with this config, and what speaks against it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from verl_sync_plugin.config.settings import KEY_PREFIX, NOT_IN_USE
    from verl_sync_plugin.hooks.driver import OFF, settle
    from verl_sync_plugin.rollouts import ROLLOUTS

    try:
        line = settle(config, command.overrides, command.program)
        if line == "weight sync on":
            _build_rollout_config(config)
    except ValueError as error:
        text, remedy = _halves(str(error))
        if isinstance(error, OmegaConfBaseException):
            text, remedy = " ".join(str(error).split()), "correct the value"
        return "", [problem(CHECK, text, remedy)]
    except Exception as error:
        return "", [problem(CHECK, " ".join(f"{type(error).__name__}: {error}".split()), "correct the value")]
    if line == OFF:
        return line, [warning(CHECK, line, f"leave out {KEY_PREFIX}.enabled=False for the plugin to move them")]
    if line.startswith(NOT_IN_USE):
        return line, [problem(CHECK, line, "leave that key out, or use another value, for the plugin to move them")]
    if not line:
        key = "actor_rollout_ref.rollout.name"
        text = f"{key}={OmegaConf.select(config, key)}: the plugin does not serve this rollout, stock verl moves its "
        return line, [problem(CHECK, f"{text}weights", f"set {key} to one of: {', '.join(ROLLOUTS)}")]
    return line, [ok(CHECK, line), *check_model(config)]


def _build_rollout_config(config: Any) -> None:
    """What every worker of a run does first with the rollout's config: verl's checks and ours.

    Raises:
        ValueError: from either.
    """
    from verl.utils.config import omega_conf_to_dataclass

    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)


def _halves(text: str) -> tuple[str, str]:
    """A refusal's cause and its remedy: the plugin's end with the remedy as a sentence of its own, or after ``;``."""
    for mark in (". ", "; "):
        cause, found, remedy = text.rpartition(mark)
        if found and cause:
            return cause, remedy.rstrip(".")
    return text, "correct the value"
