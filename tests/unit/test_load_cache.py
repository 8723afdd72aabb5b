# SPDX-License-Identifier: Apache-2.0
"""What a load leaves in the engine's allocator goes back before its commit; the allocator's counts are made up."""

from __future__ import annotations

import pytest
import torch

from verl_sync_plugin.receiver.load_cache import LEAST_BYTES, LoadCache


class Allocator:
    """Holds what the engine keeps, and what loads have left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved, self.cached, self.emptied = 1 << 40, 0, 0
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: self.reserved + self.cached)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty)

    def empty(self) -> None:
        self.cached, self.emptied = 0, self.emptied + 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="its counts would be the device's")
@pytest.mark.parametrize(("grown", "emptied"), [(0, 0), (LEAST_BYTES // 3, 0), (LEAST_BYTES, 1), (1 << 30, 1)])
def test_only_what_a_load_has_left_is_emptied(grown: int, emptied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of before stays: generating has filled it and will again."""
    allocator, cache = Allocator(monkeypatch), LoadCache()
    allocator.cached = LEAST_BYTES
    for _ in range(2):  # every load counts for itself
        allocator.emptied = 0
        cache.begin()
        allocator.cached += grown
        cache.give_back()
        assert allocator.emptied == emptied


def test_without_a_device_there_is_nothing_to_give_back() -> None:
    cache = LoadCache()
    cache.begin()
    cache.give_back()
