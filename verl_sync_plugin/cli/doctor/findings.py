# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of one thing that it looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

OK, WARNING, PROBLEM = LEVELS = ("ok", "warning", "problem")  # from harmless to grave


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's.

    Attributes:
        check: a stable name of what was looked at, such as ``entry-point`` or ``hook/trainers`` (docs/doctor.md).
        level: ``ok``, ``warning`` (a run works, but slower or only under a condition that the text names) or
            ``problem`` (a run fails, or the plugin does not move its weights).
        text: what was found.
        remedy: what to do about it; empty where nothing is to be done.
    """

    check: str
    level: str
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.level in LEVELS
        assert self.remedy or self.level == OK, f"{self.check}: a finding that is not ok says what to do"

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def ok(check: str, text: str) -> Finding:
    return Finding(check, OK, text)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, WARNING, text, remedy)


def problem(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, PROBLEM, text, remedy)


def of_dicts(dicts: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Findings that came from another process."""
    return [Finding(**each) for each in dicts]


def worst(findings: Iterable[Finding]) -> str:
    """The gravest level; ``ok`` where there are none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default=OK)
