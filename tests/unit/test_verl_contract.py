# SPDX-License-Identifier: Apache-2.0
"""Checks what the plugin imports, overrides and calls of verl against the signatures that it was written for.

``python tests/unit/test_verl_contract.py [FOLDER]`` compares ``verl_contract.txt`` with the verl that is installed, or
lies in a folder, and prints each difference. ``CONTRACT=write`` rewrites the file from that verl.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import verl
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

import verl_sync_plugin

PACKAGE, INSTALLED = Path(verl_sync_plugin.__file__).parent, Path(verl.__file__).parents[1]
# Where classes of verl's are overridden; the rollout config and the callback of Hydra are dataclasses of their own
FILES = [*(f"hooks.{name}" for name in ("engines", "megatron_engine", "separate", "trainer", "worker"))]
FILES += [f"rollouts.sglang.{name}" for name in ("adapter", "server")]


FILE = Path(__file__).parents[1] / "verl_contract.txt"


def stored() -> dict[str, str]:
    """Signatures by ``module:name``, as the file has them."""
    lines = [line for line in FILE.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split(" ", 1) for line in lines)


def found(root: Path, names: list[str]) -> dict[str, str]:
    """Signatures by ``module:name``, as the sources beneath ``root`` have them; ``missing`` where there is none."""
    return {name: _signature(root, *name.split(":")) for name in names}


def differences(root: Path) -> dict[str, str]:
    """Returns what differs from the file in the sources beneath ``root``."""
    expected = stored()
    now = found(root, list(expected))
    return {name: f"{now[name]}, was {text}" for name, text in expected.items() if now[name] != text}


def _signature(root: Path, module: str, name: str) -> str:
    body: list[ast.stmt] = _body(root, module)
    node: ast.AST | None = None
    for part in name.split("."):
        node = next((each for each in _statements(body) if part in _names(each)), None)
        if node is None:
            return "missing"
        body = getattr(node, "body", [])
    if isinstance(node, ast.ClassDef):
        return f"class({', '.join(map(ast.unparse, node.bases))})"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}({_parameters(node.args)})"
    return "value"


@cache
def _body(root: Path, module: str) -> list[ast.stmt]:
    path = root.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text()).body if file.is_file() else []


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Also those that a condition or an attempt stands around."""
    for each in body:
        yield each
        if isinstance(each, ast.If | ast.Try):
            yield from _statements(each.body)


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _parameters(arguments: ast.arguments) -> str:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for each in filter(None, every):
        each.annotation = None
    return ast.unparse(arguments)


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
    """After a look at each difference: ``CONTRACT=write python tests/unit/test_verl_contract.py``."""
    assert differences(INSTALLED) == {}


def test_the_list_has_all_that_is_imported_and_overridden() -> None:
    used = {f"{verls.__module__}:{verls.__qualname__}.{name}" for _, name, verls in overrides()} | set(imports())
    assert used - stored().keys() == set()


def test_an_override_takes_arguments_that_it_does_not_know() -> None:
    """Newer releases of verl pass more of them; what becomes of each: ``test_server.py``."""
    for ours, name, _ in overrides():
        method = getattr(vars(ours)[name], "__func__", vars(ours)[name])
        kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
        assert name.startswith("__") or inspect.Parameter.VAR_KEYWORD in kinds, (ours, name)


if __name__ == "__main__":
    where = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else INSTALLED
    if os.environ.get("CONTRACT") == "write":
        head = [line for line in FILE.read_text().splitlines() if line.startswith("#")]
        lines = [f"{name} {text}" for name, text in sorted(found(where, list(stored())).items())]
        FILE.write_text("\n".join([*head, *lines]) + "\n")
    for name, text in differences(where).items():
        print(f"{name}: {text}")
