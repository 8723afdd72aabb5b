# SPDX-License-Identifier: Apache-2.0
"""One engine of two tensor-parallel ranks, each with a rollout rank beside it, apart from two trainer ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from separate.driver import Failure, together
from separate.members import exact, members

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_each_tensor_parallel_rank_reads_only_its_part(tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    """Staged at first, then where the parameters lie: both ranks together read everything once, and what both keep
    twice."""
    with members(tiny_model("qwen2"), 1, tp=2) as (driver, ranks):
        first = ranks[0]
        together(driver.trainers, "share", tmp_path)
        first.ask("read", tmp_path / "before").answer()
        kept = first.ask("nbytes", tmp_path / "kept").answer()
        for version, delivery in ((1, "staged"), (2, "direct"), (3, "direct")):
            together(driver.trainers, "train", version)
            said = driver.sync(version, ranks)
            assert not any(isinstance(each, Failure) for each in said), said
            reports, whole = said[2:], driver.trainers[0].ask("packed").answer()
            assert all(0.5 <= nbytes / whole < 0.51 for nbytes in kept), (kept, whole)
            assert [report["own_bytes"] + report["peer_bytes"] for report in reports] == kept, reports
            assert all(report["delivery"] == delivery and report["peer_bytes"] > 0 for report in reports), reports
            assert all(report["gathered_bytes"] == report["network_bytes"] == 0 for report in reports), reports
            # the trainer's parameters lie in fp32, staged they are in bf16
            read = first.ask("read", tmp_path / f"read{version}").answer()
            assert read == [(2 if delivery == "direct" else 1) * nbytes for nbytes in kept], (version, read, kept)
            exact(driver, [first], tmp_path / f"v{version}")
        # the engine generates until it is asked, so not while the trainer plans
        assert first.ask("asked_behind_plan").answer() == [True] * 3
