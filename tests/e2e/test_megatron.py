"""verl's own ``main_ppo`` with a Megatron trainer: two steps with tensor, and with pipeline parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from e2e import checks
from e2e.runs import Run, Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

ROLLOUT = "actor_rollout_ref.rollout"
MANAGER = "MegatronSGLangShardingManager"
OVERRIDES = (
    f"{ROLLOUT}.load_format=dummy",
    f"{ROLLOUT}.update_weights_bucket_megabytes=1",
    f"{ROLLOUT}.custom.sync.timeout_seconds=90",
)
LAYOUTS = {"tp2": (2, 1), "pp2": (1, 2)}  # tensor and pipeline parallel size


@pytest.fixture(scope="module", params=list(LAYOUTS))
def trained(request: pytest.FixtureRequest, even_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps, so three syncs."""
    setup = Setup(OVERRIDES, ranks=2, steps=2, model=even_model, megatron=LAYOUTS[str(request.param)])
    return main_ppo(setup, tmp_path_factory.mktemp("trained"))


def test_trains_and_the_engine_has_the_weights_of_every_step(trained: Run) -> None:
    checks.reached(trained, steps=2)
    assert len(trained.logged) == 2, trained.tail
    checks.same_weights(trained)


def test_every_process_uses_the_plugin(trained: Run) -> None:
    checks.plugin_ran(trained, ranks=2, manager=MANAGER)
    checks.reported(trained, steps=2, manager=MANAGER)
    for step in (1, 2):
        checks.metrics_complete(trained.logged[step], step)


def test_whole_model_travels_once(trained: Run, even_model: Path) -> None:
    with safe_open(even_model / "model.safetensors", "pt") as checkpoint:
        sizes = {name: checkpoint.get_tensor(name).nbytes for name in checkpoint.keys()}  # noqa: SIM118
    assert len(trained.reports) == 3, trained.tail
    for report in trained.reports:
        assert report["tensors"] == len(sizes)
        assert sum(sizes.values()) <= report["nbytes"] <= 1.05 * sum(sizes.values())
        assert report["coverage_expected"] == 17 and report["coverage_missing"] == 0
