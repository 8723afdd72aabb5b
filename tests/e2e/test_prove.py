# SPDX-License-Identifier: Apache-2.0
"""``verl-sync prove`` with a real engine and a real model: proven where it is, and not where the trainer has others."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
# The trainer's model is no longer the checkpoint's in one element
OTHER_TRAINER = """
import sys, torch, transformers
honest = transformers.AutoModelForCausalLM.from_pretrained
def other(*args, **kwargs):
    model = honest(*args, **kwargs)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, -5] += 1
    return model
transformers.AutoModelForCausalLM.from_pretrained = other
from verl_sync_plugin.cli import main
sys.exit(main(sys.argv[1:]))
"""


ROW = re.compile(r"^(\S.*?) {2,}(ok|FAILED) +(.*)$", re.MULTILINE)


def proven(command: list[str], model: str, tp: int) -> tuple[str, list[tuple[str, str, str]]]:
    """The verdict, and each check with its outcome and what was found; of several ranks the first one's."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)] if tp > 1 else []
    run = subprocess.run(
        [sys.executable, *ranks, *command, "prove", model, "--tp", str(tp), "--syncs", "2"],
        env={**os.environ, "VERL_PLATFORM": "cpu"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    verdict = run.stdout.splitlines()[-1]
    assert run.returncode == (verdict != "proven"), run.stderr[-4000:]
    return verdict, ROW.findall(run.stdout)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_a_sync_of_the_checkpoint_itself_is_proven(tp: int, tiny_model: Callable[[str], str]) -> None:
    verdict, checks = proven(["-m", "verl_sync_plugin.cli"], tiny_model("qwen2"), tp)
    assert verdict == "proven" and all(outcome == "ok" for _, outcome, _ in checks), checks
    names, found_by = [name for name, *_ in checks], {name: found for name, _, found in checks}
    assert names[:4] == ["SGLang's own load", "reset 1", "sync 1 (replayed)", "sync 1, its own proof"]
    assert "sync 2 (replayed)" in names and names[-1] == "log-probabilities"
    assert tp == 1 or f"parameters of {tp} ranks" in found_by["SGLang's own load"]
    assert "as SGLang loads them itself" in found_by["sync 2 (replayed)"]


@pytest.mark.extended
@pytest.mark.parametrize("tp", [1, 2])
def test_a_trainer_with_other_weights_is_found(tp: int, tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    """The second rank of two has the element that is another: the columns of this weight are shared out."""
    script = tmp_path / "other.py"
    script.write_text(OTHER_TRAINER)
    verdict, checks = proven([str(script)], tiny_model("qwen2"), tp)
    wrong = [found for _, outcome, found in checks if outcome == "FAILED"]
    assert verdict == "NOT proven" and wrong, checks
    assert all(f"other: model.layers.1.mlp.down_proj.weight of rank {tp - 1}" in each for each in wrong)
