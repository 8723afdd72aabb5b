# SPDX-License-Identifier: Apache-2.0
"""What the engine's allocator took beyond what it keeps; the allocator's counts are made up."""

from __future__ import annotations

import pytest
import torch

from verl_sync_plugin.engine.session import Activations


def test_most_beyond_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"current": 0, "peak": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: {"reserved_bytes": {"all": counts}})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: counts.update(peak=counts["current"]))
    activations = Activations()

    def taken(current: int, peak: int) -> int:
        counts.update(current=current, peak=max(peak, counts["peak"]))
        return activations.take()

    assert taken(110, 500) == 0, "the peak of the engine's start"
    assert taken(100, 130) == 30, "the cache of the start is gone"
    assert taken(120, 150) == 50, "what is still cached was taken, too"
    assert taken(100, 105) == 20, "the peak counts from the last sync on"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_nothing_is_known_without_a_device() -> None:
    assert [Activations().take(), Activations().take()] == [0, 0]
