# SPDX-License-Identifier: Apache-2.0
"""Checks the refusals of ``verl-sync prove`` and its advice on memory; ``tests/e2e/test_prove.py`` has its proofs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from verl_sync_plugin.cli import main


def test_what_ends_the_run_for_want_of_memory_is_a_failed_check_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the way to the device; as JSON alone on the standard output, and as a table."""
    (tmp_path / "config.json").write_text("{}")

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.02 GiB.")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    assert main(["prove", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (check,) = found["checks"]
    assert not found["passed"] and not check["passed"] and (found["compared"], found["not_comparable"]) == (0, 0)
    assert check["found"].startswith("loading the trainer's model failed. rank 0: torch.OutOfMemoryError: CUDA out of")
    assert "Tried to allocate 1.02 GiB. Give the trainer's model more room: --trainer-dtype bfloat16" in check["found"]
    assert main(["prove", str(tmp_path)]) == 1
    row, _, last = capsys.readouterr().out.splitlines()[-3:]
    assert "  FAILED  " in row and last == "NOT proven"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nowhere"], "no folder with a config.json"),
        ([".", "--syncs", "0"], "--syncs 0: use 1 or more"),
        ([".", "--tp", "2"], "torchrun --nproc-per-node 2"),
    ],
)
def test_refused(words: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(["prove", *[str(tmp_path) if word == "." else word for word in words]])
    assert ended.value.code == 2 and why in capsys.readouterr().err
