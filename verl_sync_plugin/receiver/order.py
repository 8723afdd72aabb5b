# SPDX-License-Identifier: Apache-2.0
"""Finds writes of a load whose order matters: a replay writes all constants first, then the copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import TypeVar

from verl_sync_plugin.receiver.intervals import meet
from verl_sync_plugin.receiver.recording import Copy, Fill

W = TypeVar("W", Copy, Fill)


def overwritten(copies: Sequence[Copy], fills: Sequence[Fill]) -> list[str]:
    """Names of tensors of which a later constant overwrites some bytes in the model."""
    by_storage = _by_storage(copies) if fills else {}
    found: dict[str, None] = {}
    for fill in fills:
        for copy in by_storage.get(fill.target.untyped_storage()._cdata, ()):
            if copy.name not in found and copy.order < fill.order and meet(copy.target, fill.target):
                found[copy.name] = None
    return list(found)


def fills_contradict(fills: Sequence[Fill]) -> bool:
    """Whether different constants are written to the same bytes."""
    for together in _by_storage(fills).values():
        if len({fill.value for fill in together}) > 1:
            pairs = combinations(together, 2)
            if any(one.value != other.value and meet(one.target, other.target) for one, other in pairs):
                return True
    return False


def _by_storage(writes: Iterable[W]) -> dict[int, list[W]]:
    found: dict[int, list[W]] = {}
    for write in writes:
        found.setdefault(write.target.untyped_storage()._cdata, []).append(write)
    return found
