# SPDX-License-Identifier: Apache-2.0
"""verl's own ``main_ppo`` with a Megatron trainer: two steps with tensor, with pipeline and with expert parallelism.

All of it in ``make test-all``. ``make test`` has a run with LoRA (``test_megatron_lora.py``), real engines fed by
Megatron (``bare_engine``), and the contract tests, which compare bit for bit what layouts send.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors import safe_open

from e2e import checks
from e2e.runs import Run, Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1000)]

ROLLOUT = "actor_rollout_ref.rollout"
MANAGER = "MegatronSGLangShardingManager"
OVERRIDES = (
    f"{ROLLOUT}.load_format=dummy",
    f"{ROLLOUT}.update_weights_bucket_megabytes=1",
    f"{ROLLOUT}.custom.sync.timeout_seconds=90",
)


class Layout(NamedTuple):
    """One way to train.

    Attributes:
        sizes: tensor, pipeline and expert parallel size.
        kind: of model.
        model: SGLang's class for it.
        parameters: as many as SGLang has.
        padded: how many times the model's bytes may travel: all ranks' segments of a bucket are as long as the longest.
    """

    sizes: tuple[int, int, int]
    kind: str = "qwen2"
    model: str = "Qwen2ForCausalLM"
    parameters: int = 17
    padded: float = 1.05


LAYOUTS = [
    pytest.param(Layout((1, 1, 2), "qwen3-moe", "Qwen3MoeForCausalLM", 21, 1.15), id="ep2"),
    pytest.param(Layout((2, 1, 1)), id="tp2"),
    pytest.param(Layout((1, 2, 1)), id="pp2"),
]


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    found: Layout = request.param
    return found


@pytest.fixture(scope="module")
def model(layout: Layout, even_model: Path, tiny_model: Callable[[str], str]) -> Path:
    return even_model if layout.kind == "qwen2" else Path(tiny_model(layout.kind))


@pytest.fixture(scope="module")
def trained(layout: Layout, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps, so three syncs."""
    setup = Setup(OVERRIDES, ranks=2, steps=2, model=model, megatron=layout.sizes)
    return main_ppo(setup, tmp_path_factory.mktemp("trained"))


def test_trains_and_the_engine_has_the_weights_of_every_step(trained: Run) -> None:
    checks.reached(trained, steps=2)
    assert len(trained.logged) == 2, trained.tail
    checks.same_weights(trained)


def test_every_process_uses_the_plugin(trained: Run, layout: Layout) -> None:
    checks.plugin_ran(trained, ranks=2, manager=MANAGER, model=layout.model)
    checks.reported(trained, steps=2, manager=MANAGER)
    for step in (1, 2):
        checks.metrics_complete(trained.logged[step], step)


def test_whole_model_travels_once(trained: Run, layout: Layout, model: Path) -> None:
    with safe_open(model / "model.safetensors", "pt") as checkpoint:
        sizes = {name: checkpoint.get_tensor(name).nbytes for name in checkpoint.keys()}  # noqa: SIM118
    assert len(trained.reports) == 3, trained.tail
    for report in trained.reports:
        assert report["tensors"] == len(sizes)
        assert sum(sizes.values()) <= report["nbytes"] <= layout.padded * sum(sizes.values())
        assert report["coverage_expected"] == layout.parameters and report["coverage_missing"] == 0
