# SPDX-License-Identifier: Apache-2.0
"""Finds measured times, in the README and in docs, that no result file named in their section holds.

``python .ci/figures.py`` lists them and exits with 1. A time is a decimal number of seconds, or a number of ms.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIGURE = re.compile(r"(\d+\.\d+|\d+(?= ms)) (s|ms)\b")
NO_SECONDS = re.compile(r"/outer/(?!paused)|correlation")  # another clock of the same calls; no time
GENERATED = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)


def numbers(found: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """All floats in a part of a result, by their place without the numbers of samples."""
    if isinstance(found, float):
        yield path, found
    elif isinstance(found, dict):
        for key, value in found.items():
            yield from numbers(value, f"{path}/{key}")
    elif isinstance(found, list):
        for value in found:
            yield from numbers(value, path)


def seconds_in(result: Path) -> set[float]:
    """Seconds that a result stands for: medians and extremes of samples, with and without the first one, which counts
    alone, too."""
    known = set[float]()
    for run in json.loads(result.read_text(encoding="utf-8"))["runs"]:
        groups = defaultdict[str, list[float]](list)
        for path, value in numbers({key: run[key] for key in ("stages", "samples")}):
            if not NO_SECONDS.search(path):
                groups[path].append(value)
        for group in groups.values():
            for some in (group, group[1:] or group):
                known |= {some[0], statistics.median(some), min(some), max(some)}
    return known


def unheld(page: str, results: Path, always: tuple[str, ...] = ()) -> list[str]:
    """The times on a page that no result named in their section holds, nor one of ``always``."""
    names = {path.stem: path for path in results.glob("*.json")}
    missing = []
    for section in re.split(r"(?m)^#+ ", GENERATED.sub("", page)):
        named = {word for word in re.findall(r"`([\w-]+)`", section) if word in names} | {*always} & names.keys()
        known = set().union(*(seconds_in(names[name]) for name in named))
        for text, unit in FIGURE.findall(section):
            size = 1e3 if unit == "ms" else 1.0
            half = 0.5 * 10 ** -len(text.partition(".")[2]) + 1e-9
            if not any(abs(value * size - float(text)) <= half for value in known):
                missing.append(f"{text} {unit} ({section.splitlines()[0]})")
    return missing


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from benchmarks.report import HEADLINE, RESULTS

    pages = {ROOT / "README.md": tuple(HEADLINE), **dict.fromkeys(sorted(ROOT.glob("docs/**/*.md")), ())}
    found = [
        f"{page.relative_to(ROOT)}: {each}"
        for page, always in pages.items()
        for each in unheld(page.read_text(encoding="utf-8"), RESULTS, always)
    ]
    print(
        "\n".join(
            [*found, "no result named in the section holds these: name the file, or take the figure out"]
            if found
            else []
        )
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
