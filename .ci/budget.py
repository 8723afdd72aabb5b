# SPDX-License-Identifier: Apache-2.0
"""Holds the size of the project: no room exceeds its ceiling in budget.toml, and no commit raises a ceiling.

Run without arguments to check; ``--lower`` writes today's sizes where they are below the ceilings.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from itertools import pairwise
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
FILE = ".ci/budget.toml"
ROOMS = {"verl_sync_plugin": "*.py", "cpu_stack": "*.py", "tests": "*.py", "benchmarks": "*.py", "docs": "*.md"}
HEAD = """# Ceilings of `make lint`: a commit may lower a number, not raise it. Lines of .py files (docs: .md);
# code leaves out blank lines, comments, docstrings and imports. `python .ci/budget.py --lower` writes today's sizes.
"""
Sizes = dict[str, dict[str, int]]


def sizes() -> Sizes:
    """Files, lines and lines of code of every room."""
    found: Sizes = {}
    for room, pattern in ROOMS.items():
        texts = [path.read_text() for path in sorted((ROOT / room).rglob(pattern)) if "build" not in path.parts]
        found[room] = {"files": len(texts), "lines": sum(text.count("\n") for text in texts)}
        if pattern == "*.py":
            found[room]["code"] = sum(map(code_lines, texts))
    return found


def code_lines(text: str) -> int:
    """Lines that hold code: no blank ones, no comments, docstrings or imports."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        docstring = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def ceilings_of(text: str) -> Sizes:
    return tomllib.loads(text)


def raised(history: list[Sizes]) -> list[str]:
    """What a later version of the file allows more of than an earlier one, newest first."""
    return [
        f"{FILE}: {room}.{kind} was raised from {before} to {after[room][kind]}; lower it again"
        for after, earlier in pairwise(history)
        for room, kinds in earlier.items()
        for kind, before in kinds.items()
        if after.get(room, {}).get(kind, 0) > before
    ]


def versions() -> list[Sizes]:
    """The file in the working tree, and in every commit that changed it, newest first."""
    log = ["git", "-C", str(ROOT), "log", "--format=%H", "--", FILE]
    commits = subprocess.run(log, capture_output=True, text=True, check=False).stdout.split()
    shown = (
        subprocess.run(["git", "-C", str(ROOT), "show", f"{commit}:{FILE}"], capture_output=True, text=True, check=True)
        for commit in commits
    )
    return [ceilings_of((ROOT / FILE).read_text()), *(ceilings_of(each.stdout) for each in shown)]


def main() -> int:
    found, history = sizes(), versions()
    ceilings = history[0]
    if "--lower" in sys.argv:
        lower = {r: {k: min(n, ceilings.get(r, {}).get(k, n)) for k, n in kinds.items()} for r, kinds in found.items()}
        rows = (f"{room} = {{ {', '.join(f'{k} = {n}' for k, n in kinds.items())} }}" for room, kinds in lower.items())
        (ROOT / FILE).write_text(HEAD + "\n".join(rows) + "\n")
        return 0
    wrong = raised(history) + [
        f"{room}: {number} {kind}, and the ceiling in {FILE} is {ceilings[room][kind]}. Take something out"
        for room, kinds in found.items()
        for kind, number in kinds.items()
        if number > ceilings[room][kind]
    ]
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
