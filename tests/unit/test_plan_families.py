# SPDX-License-Identifier: Apache-2.0
"""``verl-sync plan`` for every model family."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from plans import planned

from contract.families import FAMILIES
from verl_sync_plugin.cli.plan.model import OWN_PATH, REPLAYED

ROOT = Path(__file__).resolve().parents[2]


def test_families_are_those_of_the_documentation() -> None:
    """Rows of docs/families.md, which other tests make, say the same as the table of the plan."""
    rows = dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", (ROOT / "docs/families.md").read_text(), re.MULTILINE))
    for label, family in FAMILIES.items():
        if rows[label].startswith("exact, replayed | the same"):
            assert family.model_type in REPLAYED, label
        elif "by the model's own path" in rows[label] and "1 of " not in rows[label]:  # one of many: when it is tied
            assert family.model_type in OWN_PATH, label
    assert not set(OWN_PATH) & REPLAYED


@pytest.mark.parametrize("label", FAMILIES)
def test_every_family_is_planned_or_refused_in_one_line(label: str, tmp_path: Path, capsys: Any) -> None:
    from transformers import AutoConfig

    family = FAMILIES[label]
    AutoConfig.for_model(family.model_type, **family.config).save_pretrained(tmp_path)
    try:
        found = planned(capsys, str(tmp_path), "--world", "2")
    except SystemExit:
        (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("verl-sync plan: "))
        assert str(tmp_path) in line
        return
    assert found["tensors"] > 10 and found["bytes"] > 1e5
