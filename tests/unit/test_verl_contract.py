# SPDX-License-Identifier: Apache-2.0
"""What the plugin imports, overrides and calls of verl, against the signatures that it was written for."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

import verl_contract
import verl_sync_plugin
from verl_sync_plugin.hooks.engines import SyncFSDPEngineWithLMHead
from verl_sync_plugin.hooks.megatron_engine import SyncMegatronEngineWithLMHead
from verl_sync_plugin.hooks.separate import OutlivingManager, SyncCheckpointEngine
from verl_sync_plugin.hooks.trainer import OutlivingLLMServerClient, SpanningLLMServerClient, reporting
from verl_sync_plugin.hooks.worker import SyncActorRolloutRefWorker, SyncDetachActorWorker
from verl_sync_plugin.rollouts.sglang.adapter import SyncServerAdapter
from verl_sync_plugin.rollouts.sglang.server import SyncSGLangHttpServer, SyncSGLangReplica

PACKAGE = Path(verl_sync_plugin.__file__).parent
SUBCLASSES = [
    SyncCheckpointEngine,
    OutlivingManager,
    SyncFSDPEngineWithLMHead,
    OutlivingLLMServerClient,
    SpanningLLMServerClient,
    SyncMegatronEngineWithLMHead,
    reporting(PPOTrainer),
    SyncActorRolloutRefWorker,
    SyncDetachActorWorker,
    SyncServerAdapter,
    SyncSGLangReplica,
    SyncSGLangHttpServer,
]


def overrides() -> Iterator[tuple[type, str, type]]:
    """Each method of one of our classes that overrides one of verl's: our class, the name, verl's class."""
    for subclass in SUBCLASSES:
        mine = [base for base in subclass.__mro__ if base.__module__.startswith("verl_sync_plugin")]
        theirs = [base for base in subclass.__mro__ if base.__module__.startswith("verl.")]
        for ours in mine:
            for name, method in vars(ours).items():
                verls = next((base for base in theirs if name in vars(base)), None)
                if verls is not None and callable(getattr(method, "__func__", method)):
                    yield ours, name, verls


def imports() -> Iterator[str]:
    """What the package imports of verl, as ``module:name`` of where verl defines it."""
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name == "cpu":
            continue
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


METHODS = {f"{ours.__name__}.{name}": vars(ours)[name] for ours, name, _ in overrides() if not name.startswith("__")}


@pytest.mark.parametrize("name", METHODS)
def test_an_override_takes_arguments_that_it_does_not_know(name: str) -> None:
    """Newer releases of verl pass more of them; what becomes of each is the next test's affair."""
    method = getattr(METHODS[name], "__func__", METHODS[name])
    kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD in kinds
