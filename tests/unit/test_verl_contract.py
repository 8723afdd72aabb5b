# SPDX-License-Identifier: Apache-2.0
"""Checks what the plugin uses of verl against stored signatures; ``CONTRACT=write`` stores those installed."""

import ast
import importlib
import inspect
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import verl
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

import verl_sync_plugin

PACKAGE, INSTALLED = Path(verl_sync_plugin.__file__).parent, Path(verl.__file__).parents[1]
# Where classes of verl's are overridden; the rollout config and the callback of Hydra are dataclasses of their own
FILES = [f"hooks.{name}" for name in ("engines", "megatron_engine", "separate", "trainer", "worker")]
FILES += [f"rollouts.sglang.{name}" for name in ("adapter", "server")]
FILE = Path(__file__).parents[1] / "verl_contract.txt"


def stored() -> dict[str, str]:
    """Signatures by ``module:name``, as the file has them."""
    lines = [line for line in FILE.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split(" ", 1) for line in lines)


def found(root: Path) -> dict[str, str]:
    """The same, as the sources in ``root`` have them; ``missing`` where there is none."""
    names = [name.split(":") for name in stored()]
    return {f"{module}:{name}": signatures(root, module).get(name, "missing") for module, name in names}


def differences(root: Path) -> dict[str, str]:
    """Returns what differs from the file in the sources in ``root``."""
    now = found(root)
    return {name: f"{now[name]}, was {text}" for name, text in stored().items() if now[name] != text}


@cache
def signatures(root: Path, module: str) -> dict[str, str]:
    """Signatures of what a module defines, by dotted name, also under conditions and attempts."""
    path = root.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    known: dict[str, str] = {}

    def look(body: list[ast.stmt], prefix: str = "") -> None:
        for node in body:
            match node:
                case ast.ClassDef():
                    known.setdefault(prefix + node.name, f"class({', '.join(map(ast.unparse, node.bases))})")
                    look(node.body, f"{prefix}{node.name}.")
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    word = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
                    known.setdefault(prefix + node.name, f"{word}({parameters(node.args)})")
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    known.setdefault(prefix + name, "value")
                case ast.If() | ast.Try():
                    look(node.body, prefix)

    if file.is_file():
        look(ast.parse(file.read_text()).body)
    return known


def parameters(arguments: ast.arguments) -> str:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for each in filter(None, every):
        each.annotation = None
    return ast.unparse(arguments)


def overrides() -> Iterator[tuple[type, str, type]]:
    """Each method of one of our classes that overrides one of verl's: our class, the name, verl's class."""
    modules = [importlib.import_module(f"verl_sync_plugin.{name}") for name in FILES]
    classes = {each for module in modules for each in vars(module).values() if inspect.isclass(each)}
    classes.add(importlib.import_module("verl_sync_plugin.hooks.trainer").reporting(PPOTrainer))
    for subclass in (each for each in classes if not any(issubclass(other, each) for other in classes - {each})):
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
    if os.environ.get("CONTRACT") == "write":
        head = [line for line in FILE.read_text().splitlines() if line.startswith("#")]
        lines = [f"{name} {text}" for name, text in sorted(found(INSTALLED).items())]
        FILE.write_text("\n".join([*head, *lines]) + "\n")
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
