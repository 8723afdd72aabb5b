# SPDX-License-Identifier: Apache-2.0
"""What ``verl-sync plan`` says, for the tests of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from verl_sync_plugin.cli import main


def planned(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *options, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line with which a plan ends that cannot be made."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", *options])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and line.startswith("verl-sync plan: ")
    return line
