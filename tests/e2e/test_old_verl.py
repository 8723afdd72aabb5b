# SPDX-License-Identifier: Apache-2.0
"""``main_ppo`` of verl 0.9.0, from a folder that goes before the installed one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e import checks
from e2e.runs import Run, Setup, main_ppo
from packages import folder_with

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1000)]

RELEASE = "0.9.0"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
OVERRIDES = {
    "full": (f"{ROLLOUT}.update_weights_bucket_megabytes=1",),
    "served": (
        f"{MODEL}.lora.merge=False",
        f"{MODEL}.lora.rank=8",
        f"{MODEL}.lora.alpha=16",
        f"{MODEL}.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]",  # this verl hands SGLang "all-linear" as it is
        f"+{ROLLOUT}.engine_kwargs.sglang.lora_backend=torch_native",
    ),
}


@pytest.mark.parametrize("kind", OVERRIDES)
def test_it_trains(kind: str, tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """SGLang starts with random weights; served as an adapter or not, all that it needs must have come by a sync."""
    folder = folder_with(tmp_path_factory, f"verl=={RELEASE}")
    overrides = (f"{ROLLOUT}.load_format=dummy", *OVERRIDES[kind])
    setup = Setup(
        overrides, steps=2, model=Path(tiny_model("qwen2")), modules=("e2e.verl_version",), path=(str(folder),)
    )
    run: Run = main_ppo(setup, tmp_path_factory.mktemp(kind))
    checks.reached(run, steps=2)
    said = {line.text.partition("[e2e] ")[2] for line in run.matching(r"\[e2e\] verl ")}
    assert said == {f"verl {RELEASE} from {folder}/verl/__init__.py"}, run.tail
    checks.same_weights(run)
    checks.reported(run, steps=2)
    if kind == "full":
        checks.plugin_ran(run, ranks=1)
    else:
        factors = 2 * 2 * 4  # A and B of four linear layers in two blocks
        assert run.reports[0]["buckets"] > 0 and not run.reports[0]["coverage_missing"], run.reports
        assert [report["tensors"] for report in run.reports[1:]] == [factors] * 2, run.reports
