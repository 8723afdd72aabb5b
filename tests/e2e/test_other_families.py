# SPDX-License-Identifier: Apache-2.0
"""``main_ppo`` with families whose sync is not that of Qwen2: Mixtral, by two engine ranks, and Gemma 2.

All of it in ``make test-all``. ``make test`` has Mixtral under the legacy trainer (``test_legacy_trainer.py``) and both
in ``tests/contract/test_families.py``, which compares every parameter bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from e2e import checks
from e2e.runs import Run, Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1000)]

ROLLOUT = "actor_rollout_ref.rollout"
SMALL_BUCKETS = f"{ROLLOUT}.update_weights_bucket_megabytes=1"


class Family(NamedTuple):
    """One family and what its syncs are.

    Attributes:
        kind: of model, as ``make_model.py`` names it.
        model: SGLang's class for it.
        ranks: trainer ranks, and tensor-parallel ranks of the engine.
        overrides: what it needs.
        replayed: from the second sync on all its tensors are replayed, or none.
        missing: parameters and buffers that no sync writes.
    """

    kind: str
    model: str
    ranks: int
    overrides: tuple[str, ...]
    replayed: bool
    missing: int


FAMILIES = (
    # verl's default: the engine starts with random weights, so only a sync can make it sample like the trainer
    Family("mixtral", "MixtralForCausalLM", 2, (f"{ROLLOUT}.load_format=dummy",), replayed=True, missing=0),
    # Only eager attention caps its logits in the trainer. A buffer that is in no checkpoint forbids random weights, so
    # it is the second step that shows a sync: the checkpoint's weights are stale by then
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        1,
        ("actor_rollout_ref.model.override_config.attn_implementation=eager",),
        replayed=False,
        missing=1,
    ),
)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.kind)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture(scope="module")
def trained(family: Family, tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps, so three syncs."""
    overrides = (SMALL_BUCKETS, *family.overrides)
    setup = Setup(overrides, family.ranks, steps=2, model=Path(tiny_model(family.kind)))
    return main_ppo(setup, tmp_path_factory.mktemp(family.kind))


def test_the_engine_has_the_weights_of_every_step(trained: Run) -> None:
    checks.reached(trained, steps=2)
    checks.same_weights(trained)


def test_the_plugin_moved_them(trained: Run, family: Family) -> None:
    checks.plugin_ran(trained, family.ranks, model=family.model, backup="on")
    checks.reported(trained, steps=2)


def test_its_syncs_are_what_the_table_of_families_says(trained: Run, family: Family) -> None:
    assert len(trained.reports) == 3, trained.tail
    for report in trained.reports:
        assert report["hashed_tensors"] == report["tensors"], report
        assert report["coverage_missing"] == family.missing, report
    last = trained.reports[-1]
    assert last["replayed_tensors"] == (last["tensors"] if family.replayed else 0), last
