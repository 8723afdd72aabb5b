# SPDX-License-Identifier: Apache-2.0
"""Whose hash every byte of a bucket goes into: one hash per tensor, added up wherever parts of it are. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from verl_sync_plugin.layout.tensors import Entry


@dataclass(frozen=True, slots=True)
class Hull:
    """Consecutive bytes ``[first, end)`` of a bucket that lie in one segment.

    Attributes:
        first: first byte.
        end: one past the last.
        names: the tensors that hold these bytes, in the bucket's order; several where weights are tied. The first
            one's hash counts them.
        equal: every one of them holds all of these bytes.
    """

    first: int
    end: int
    names: tuple[str, ...]
    equal: bool = True


def numbers_of(buckets: Iterable[Sequence[Entry]]) -> dict[str, int]:
    """The tensors of a sync, numbered in the order of their names; the same for every plan of them."""
    names = sorted({entry.name for entries in buckets for entry in entries})
    return {name: number for number, name in enumerate(names)}


def hulls_of(entries: Sequence[Entry], low: int = 0, high: float = math.inf) -> list[Hull]:
    """The bytes of a bucket that belong to any tensor, disjoint and in ascending order.

    Args:
        entries: what the bucket holds.
        low: first byte of a segment, to be given only what lies in it.
        high: one past its last byte.
    """
    spans = sorted(
        (first, end, place)
        for place, entry in enumerate(entries)
        for piece in entry.pieces
        if low <= piece.source < high
        for first, end in piece.sources()
    )
    return [
        Hull(first, end, tuple(dict.fromkeys(entries[place].name for place in sorted(places))), equal)
        for first, end, places, equal in _merged(spans)
    ]


def _merged(spans: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, list[int], bool]]:
    """Overlapping spans as one."""
    index = 0
    while index < len(spans):
        first, end, place = spans[index]
        places, equal = [place], True
        index += 1
        while index < len(spans) and spans[index][0] < end:
            other, other_end, place = spans[index]
            equal = equal and (other, other_end) == (first, end)
            end = max(end, other_end)
            places.append(place)
            index += 1
        yield first, end, places, equal
