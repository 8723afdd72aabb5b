# SPDX-License-Identifier: Apache-2.0
"""LoRA on Megatron through verl's default bridge: merged on local parts, with the values of the bridge's own merge."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from worlds import run_world, stop

from megatron_cpu import checkpoints, lora
from megatron_cpu.engines import Layout, megatron_environment, on_megatron_bridge


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    """Fresh processes, with Megatron-Bridge and its megatron-core."""
    stop()
    with megatron_environment(megatron_bridge=True):
        assert run_world(1, on_megatron_bridge) == [True], "the processes have mbridge"
        yield
    stop()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def make(kind: str) -> str:
        if kind not in made:
            made[kind] = checkpoints.write(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return make


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen2", Layout(2, tp=2)),
        ("qwen2", Layout(4, tp=2, pp=2)),
        ("qwen3", Layout(2)),
    ],
    ids=lambda value: str(value),
)
def test_merged_weights_are_those_of_the_bridge(kind: str, layout: Layout, checkpoint: Callable[[str], str]) -> None:
    changed, *_ = run_world(layout.world, lora.merged, checkpoint(kind), layout, timeout=180)
    assert len(changed) == 4 * 7, "every projection of every layer is adapted"


def test_a_rank_that_fails_to_gather_factors_is_everybodys_error(checkpoint: Callable[[str], str]) -> None:
    texts = run_world(2, lora.failing, checkpoint("qwen2"), Layout(2, tp=2), timeout=120)
    assert len(set(texts)) == 1 and "rank 1: RuntimeError: injected into the gathering" in texts[0]


def test_dora_is_refused_by_name(checkpoint: Callable[[str], str]) -> None:
    first, second = run_world(2, lora.refused, checkpoint("qwen2"), timeout=120)
    assert first == second and "does not merge DoRA of Megatron-Bridge" in first and "lora.type=lora" in first
