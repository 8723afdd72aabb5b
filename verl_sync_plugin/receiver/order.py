# SPDX-License-Identifier: Apache-2.0
"""Finds writes of a load whose order matters: a replay writes all constants first, then the copies, in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl_sync_plugin.receiver.intervals import bounds, meet
from verl_sync_plugin.receiver.recording import Copy, Fill

Write = Copy | Fill


def overwritten(copies: Sequence[Copy], fills: Sequence[Fill]) -> list[str]:
    """Names of tensors of which a later constant overwrites some bytes in the model."""
    pairs = _overlapping([*copies, *fills]) if fills else iter(())
    return list(dict.fromkeys(one.name for one, other in pairs if isinstance(one, Copy) and isinstance(other, Fill)))


def grounds(copies: Sequence[Copy], fills: Sequence[Fill]) -> frozenset[int]:
    """The ``order`` of constants of which a later copy overwrites some bytes."""
    pairs = _overlapping([*copies, *fills]) if fills else iter(())
    return frozenset(one.order for one, other in pairs if isinstance(one, Fill) and isinstance(other, Copy))


def fills_contradict(fills: Sequence[Fill]) -> bool:
    """Whether different constants are written to the same bytes."""
    pairs = _overlapping(fills) if len({fill.value for fill in fills}) > 1 else iter(())
    return any(isinstance(a, Fill) and isinstance(b, Fill) and a.value != b.value for a, b in pairs)


def superseded(copies: Sequence[Copy]) -> frozenset[int]:
    """The ``order`` of copies of which a later copy of another tensor overwrites some bytes."""
    pairs = _overlapping(copies)
    return frozenset(a.order for a, b in pairs if isinstance(a, Copy) and isinstance(b, Copy) and a.name != b.name)


def mixed(copies: Sequence[Copy], others: Sequence[Copy]) -> list[str]:
    """Names of ``copies`` that share bytes of the model with one of ``others``, of another tensor: some would be
    replayed and some go through the model's load, in any order."""
    left = {copy.order for copy in others}
    pairs = _overlapping([*copies, *others]) if others else iter(())
    found = (copy for a, b in pairs if a.order not in left or b.order not in left for copy in (a, b))
    return list(dict.fromkeys(c.name for c in found if isinstance(c, Copy) and c.order not in left))


def _overlapping(writes: Sequence[Write]) -> Iterator[tuple[Write, Write]]:
    """Pairs of writes that share bytes, the earlier one first."""
    spans = sorted((*bounds(write.target), number) for number, write in enumerate(writes))
    reaching: list[tuple[int, Write]] = []  # those that end behind where the present one begins
    for low, high, number in spans:
        write = writes[number]
        reaching = [(end, other) for end, other in reaching if end > low]
        for _, other in reaching:
            if meet(other.target, write.target):
                yield (other, write) if other.order < write.order else (write, other)
        if high > low:
            reaching.append((high, write))
