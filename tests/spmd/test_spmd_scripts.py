# SPDX-License-Identifier: Apache-2.0
"""Scripts that torchrun starts, with real SGLang: both examples, and a story of everything ``SpmdRollout`` does."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "spmd"
STORY = Path(__file__).with_name("story.py")
SECONDS = 400


def torchrun(ranks: int, script: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = subprocess.run(
        [*command, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    return run.stdout


@pytest.mark.parametrize(("script", "ranks", "tp"), [
    ("fsdp2.py", 1, 1),
    pytest.param("fsdp2.py", 2, 2, marks=pytest.mark.extended),
    pytest.param("ddp.py", 2, 1, marks=pytest.mark.extended),
])  # fmt: skip
def test_an_example_trains_and_serves(script: str, ranks: int, tp: int) -> None:
    output = torchrun(ranks, EXAMPLES / script, "--tp", str(tp), "--seconds")
    measured = [json.loads(line) for line in output.splitlines() if line.startswith('{"version"')]
    assert [each["version"] for each in measured] == [1, 2, 3, 4], output[-4000:]
    assert {each["manager"] for each in measured} == {"SpmdShardingManager"}
    assert all(0 < each["phase_seconds"] < each["seconds"] and each["tensors"] == 27 for each in measured)
    assert output.count("loader active") == ranks, "one of our loaders in every engine rank"
    (difference,) = (line for line in output.splitlines() if line.startswith("log-probs of trainer and rollout differ"))
    assert float(difference.rpartition(" ")[2]) < 0.15


def test_a_scripts_story(tiny_model: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_SYNC_REPORT_FILE", str(tmp_path / "reports"))
    output = torchrun(2, STORY, tiny_model("qwen2"))
    assert all(f"rank {rank} has seen it all" in output for rank in range(2))
    reports = [json.loads(line) for line in (tmp_path / "reports").read_text().splitlines()]
    assert len(reports) > 10 and {report["manager"] for report in reports} == {"SpmdShardingManager"}
