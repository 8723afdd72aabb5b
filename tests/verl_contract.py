# SPDX-License-Identifier: Apache-2.0
"""Lists what the plugin imports, overrides and calls of verl, with the signatures that it was written for.

``python tests/verl_contract.py [FOLDER]`` compares ``verl_contract.txt`` with the verl that is installed, or lies in a
folder, without importing it, and prints each difference. ``CONTRACT=write`` rewrites the file from that verl.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_suffix(".txt")


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


def installed() -> Path:
    """The folder that verl is installed in."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


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


if __name__ == "__main__":
    where = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else installed()
    if os.environ.get("CONTRACT") == "write":
        head = [line for line in FILE.read_text().splitlines() if line.startswith("#")]
        lines = [f"{name} {text}" for name, text in sorted(found(where, list(stored())).items())]
        FILE.write_text("\n".join([*head, *lines]) + "\n")
    for name, text in differences(where).items():
        print(f"{name}: {text}")
