# SPDX-License-Identifier: Apache-2.0
"""The table in ``docs/releases.md``: SGLang releases with which ``main_ppo`` trains, and what their syncs did."""

import re
from pathlib import Path
from typing import Any

from pages import DOCS, part

ROOT = Path(__file__).resolve().parents[2]
PAGE = DOCS / "releases.md"
REQUIREMENTS = [ROOT / "requirements" / name for name in ("cpu.txt", "cpu-no-deps.txt")]


def pinned(package: str) -> str:
    """The version of a package that the stack for a CPU has."""
    text = "\n".join(file.read_text() for file in REQUIREMENTS)
    found = re.search(rf"^{package}==(\S+)$", text, re.MULTILINE)
    assert found is not None, f"no requirement of {package}"
    return found[1]


INSTALLED = pinned("sglang")
# A release, and the packages that it needs on top of the installed ones to start on a CPU
RELEASES: dict[str, tuple[str, ...]] = {
    INSTALLED: (),
    "0.5.13": (),
    "0.5.14": (),
    "0.5.20": ("apache-tvm-ffi==0.1.11", "xgrammar==0.2.1"),
    "0.5.21": ("apache-tvm-ffi==0.1.11", "xgrammar==0.2.7"),
    "0.5.22": ("apache-tvm-ffi==0.1.11", "xgrammar==0.2.7"),
    "0.5.23": ("apache-tvm-ffi==0.1.11", "xgrammar==0.2.8"),
}


def row(release: str, reports: tuple[dict[str, Any], ...], difference: float, bound: float) -> str:
    """Writes a row from the reports of a run, and from its largest difference of probabilities, with its bound."""
    last = reports[-1]
    beside = ", ".join(f"`{package}`" for package in RELEASES[release]) or "nothing"
    syncs = (
        f"{len(reports)}, {last['delivery']}; {last['replayed_tensors']} of {last['tensors']} tensors replayed, "
        f"{last['hashed_tensors']} hashed; "
        f"{last['coverage_missing']} of {last['coverage_expected']} parameters left out"
    )
    near = f"below {bound:g}" if difference < bound else f"{difference:.2g}"
    return f"| {release} | {beside} | {syncs} | {near} |"


def rows() -> dict[str, str]:
    """The rows of the table by release."""
    inside = part(PAGE.read_text(), "releases")
    return {line.split(" | ")[0].strip("| "): line for line in inside.splitlines() if re.match(r"\| \d", line)}


def table(found: dict[str, str]) -> str:
    """The table with these rows, in the order of ``RELEASES``."""
    stack = ", ".join(f"{package} {pinned(package)}" for package in ("verl", "torch", "transformers"))
    lines = [
        f"With {stack}, on a CPU:",
        "",
        "| SGLang | installed with | syncs of two steps | probability difference, largest |",
        "| --- | --- | --- | --- |",
        *(found[release] for release in RELEASES if release in found),
    ]
    return "\n".join(lines) + "\n"
