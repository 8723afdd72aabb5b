# SPDX-License-Identifier: Apache-2.0
"""Checks what the plugin imports, overrides and calls of verl against the signatures that it was written for."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

from verl.trainer.ppo.v1.trainer_base import PPOTrainer

import verl_contract
import verl_sync_plugin

PACKAGE = Path(verl_sync_plugin.__file__).parent
# Where classes of verl's are overridden; the rollout config and the callback of Hydra are dataclasses of their own
FILES = [*(f"hooks.{name}" for name in ("engines", "megatron_engine", "separate", "trainer", "worker"))]
FILES += [f"rollouts.sglang.{name}" for name in ("adapter", "server")]


def classes_of_ours() -> list[type]:
    """The classes of ours that extend verl's and are extended by no other."""
    modules = [importlib.import_module(f"verl_sync_plugin.{name}") for name in FILES]
    every = {each for module in modules for each in vars(module).values() if inspect.isclass(each)}
    every.add(importlib.import_module("verl_sync_plugin.hooks.trainer").reporting(PPOTrainer))
    last = [each for each in every if not any(issubclass(other, each) for other in every - {each})]
    last = [each for each in last if any(base.__module__.startswith("verl.") for base in each.__mro__)]
    return sorted(last, key=lambda each: f"{each.__module__}.{each.__qualname__}")


def overrides() -> Iterator[tuple[type, str, type]]:
    """Each method of one of our classes that overrides one of verl's: our class, the name, verl's class."""
    for subclass in classes_of_ours():
        mine = [base for base in subclass.__mro__ if base.__module__.startswith("verl_sync_plugin")]
        theirs = [base for base in subclass.__mro__ if base.__module__.startswith("verl.")]
        for ours in mine:
            for name, method in vars(ours).items():
                verls = next((base for base in theirs if name in vars(base)), None)
                if verls is not None and callable(getattr(method, "__func__", method)):
                    yield ours, name, verls


def imports() -> Iterator[str]:
    """Yields what the package imports of verl, as ``module:name`` of where verl defines it."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("verl."):
                for alias in node.names:
                    thing = getattr(importlib.import_module(node.module), alias.name)
                    if not inspect.ismodule(thing):
                        defined = getattr(thing, "__module__", node.module)
                        yield f"{defined if defined.startswith('verl.') else node.module}:{alias.name}"


def test_this_verl_is_the_one_that_the_plugin_was_written_for() -> None:
    """After a look at each difference: ``CONTRACT=write python tests/verl_contract.py``."""
    assert verl_contract.differences(verl_contract.installed()) == {}


def test_the_list_has_all_that_is_imported_and_overridden() -> None:
    used = {f"{verls.__module__}:{verls.__qualname__}.{name}" for _, name, verls in overrides()} | set(imports())
    assert used - verl_contract.stored().keys() == set()


def test_an_override_takes_arguments_that_it_does_not_know() -> None:
    """Newer releases of verl pass more of them; what becomes of each: ``test_server.py``."""
    for ours, name, _ in overrides():
        method = getattr(vars(ours)[name], "__func__", vars(ours)[name])
        kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
        assert name.startswith("__") or inspect.Parameter.VAR_KEYWORD in kinds, (ours, name)
