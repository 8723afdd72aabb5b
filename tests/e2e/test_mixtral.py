# SPDX-License-Identifier: Apache-2.0
"""Model families whose trainer holds other tensors than their checkpoint, in verl's own ``main_ppo``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e import checks
from e2e.runs import Run, Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

DUMMY = "actor_rollout_ref.rollout.load_format=dummy"


@pytest.fixture(scope="session")
def mixtral(tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps; stock verl sends the router and all experts under names that SGLang skips."""
    return main_ppo(Setup((DUMMY,), steps=2, model=Path(tiny_model("mixtral"))), tmp_path_factory.mktemp("mixtral"))


def test_mixtral_samples_with_the_trainers_weights(mixtral: Run) -> None:
    checks.reached(mixtral, steps=2)
    checks.same_weights(mixtral)


def test_every_parameter_of_mixtral_is_written_and_replayed(mixtral: Run) -> None:
    assert len(mixtral.reports) == 3, mixtral.tail
    for report in mixtral.reports:
        assert report["coverage_missing"] == 0 and report["tensors"] > 24, report
    assert mixtral.reports[-1]["replayed_tensors"] == mixtral.reports[-1]["tensors"], mixtral.reports


def test_a_model_that_sglang_cannot_hold_ends_the_run_at_once(tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    folder = Path(tiny_model("qwen3-moe"))
    model = tmp_path / "dense-layers"
    model.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "mlp_only_layers": [0]}))
    run = main_ppo(Setup(model=model), tmp_path)
    assert run.returncode != 0 and not run.timed_out, run.tail
    assert "Started a local Ray instance" not in run.text and "WorkerDict" not in run.text, run.tail
    assert run.matching(
        rf"^verl-sync-plugin: actor_rollout_ref\.model\.path={model}: Qwen3MoeForCausalLM with mlp_only_layers=\[0\] "
        r"cannot be synced to SGLang: .*set actor_rollout_ref\.rollout\.custom\.sync\.enabled=False"
    ), run.tail
