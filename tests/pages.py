# SPDX-License-Identifier: Apache-2.0
"""Parts of the documentation's pages that tests write, from ``<!-- NAME:begin -->`` to ``<!-- NAME:end -->``."""

import os
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def _cut(page: str, name: str) -> list[str]:
    """Returns what comes before the part, the part itself, and what comes after it; marks are in the others."""
    begin, end = (f"<!-- {name}:{mark} -->\n" for mark in ("begin", "end"))
    head, _, rest = page.partition(begin)
    text, _, tail = rest.partition(end)
    return [head + begin, text, end + tail]


def part(page: str, name: str) -> str:
    return _cut(page, name)[1]


def check(page: Path, name: str, text: str) -> None:
    """Fails where this part of the page says anything else; ``NAME=write`` in the environment writes it."""
    head, found, tail = _cut(page.read_text(encoding="utf-8"), name)
    if os.environ.get(name.upper()) == "write":
        page.write_text(head + text + tail, encoding="utf-8")
    else:
        assert found == text, f"{page.name}: {name} are others now; run this test with {name.upper()}=write"
