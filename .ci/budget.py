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
import tomllib
from pathlib import Path

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


def raised(now: Sizes, before: list[Sizes]) -> list[str]:
    """Ceilings above what some commit had lowered them to."""
    lowest: Sizes = {}
    for each in before:
        for room, kinds in each.items():
            known = lowest.setdefault(room, kinds)
            lowest[room] = {kind: min(number, known.get(kind, number)) for kind, number in kinds.items()}
    return [
        f"{FILE}: {room}.{kind} is {now[room][kind]}, and a commit had lowered it to {number}; lower it again"
        for room, kinds in lowest.items()
        for kind, number in kinds.items()
        if now.get(room, {}).get(kind, 0) > number
    ]


def committed() -> list[Sizes]:
    """The file in every commit that changed it."""
    log = ["git", "-C", str(ROOT), "log", "--format=%H", "--", FILE]
    commits = subprocess.run(log, capture_output=True, text=True, check=False).stdout.split()
    shown = (
        subprocess.run(
            ["git", "-C", str(ROOT), "show", f"{commit}:{FILE}"], capture_output=True, text=True, check=False
        )
        for commit in commits
    )
    return [tomllib.loads(each.stdout) for each in shown if each.returncode == 0]


def main() -> int:
    found, file = sizes(), ROOT / FILE
    ceilings = tomllib.loads(file.read_text()) if file.exists() else {}
    if "--lower" in sys.argv:
        lower = {r: {k: min(n, ceilings.get(r, {}).get(k, n)) for k, n in kinds.items()} for r, kinds in found.items()}
        rows = (f"{room} = {{ {', '.join(f'{k} = {n}' for k, n in kinds.items())} }}" for room, kinds in lower.items())
        file.write_text(HEAD + "\n".join(rows) + "\n")
        return 0
    wrong = raised(ceilings, committed()) + [
        f"{room}: {number} {kind}, above {ceilings.get(room, {}).get(kind, 0)}, the ceiling in {FILE}. Take some out"
        for room, kinds in found.items()
        for kind, number in kinds.items()
        if number > ceilings.get(room, {}).get(kind, 0)
    ]
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
