# SPDX-License-Identifier: Apache-2.0
"""How the parts of a tensor that engine ranks hold are weighed, so that one sum compares all of them."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.transport.proof import Parts

MOST_TIMES = 1 << 20  # a byte is counted; the hash loses nothing up to 2^32


@cache
def balance(nbytes: int, everyone: tuple[Parts, ...]) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """How every part of a tensor is to be weighed so that all bytes count equally often.

    Args:
        nbytes: of the tensor.
        everyone: the parts of each rank.

    Returns:
        How often every byte counts then, and the factor of each part of each rank. -1 and zeros where there are none,
        because some bytes are held by nobody or a part overlaps what is held unequally often.
    """
    nothing = -1, tuple(tuple(0 for _ in parts) for parts in everyone)
    spans = [[_spans(part) for part in parts] for parts in everyone]
    all_spans = [span for parts in spans for span in parts if len(span)]
    if not all_spans:
        return nothing
    joined = np.concatenate(all_spans)
    edges = np.unique(joined)
    if edges[0] != 0 or edges[-1] != nbytes:
        return nothing
    change = np.zeros(len(edges), dtype=np.int64)
    np.add.at(change, np.searchsorted(edges, joined[:, 0]), 1)
    np.add.at(change, np.searchsorted(edges, joined[:, 1]), -1)
    held = np.cumsum(change)[:-1]  # how often the bytes from each edge to the next are held
    times = math.lcm(*map(int, np.unique(held))) if held.min() > 0 else 0
    if not 0 < times <= MOST_TIMES:
        return nothing
    changes = np.concatenate(([0], np.cumsum(np.diff(held) != 0)))
    factors = [[_factor(span, edges, held, changes, times) for span in parts] for parts in spans]
    if any(factor is None for parts in factors for factor in parts):
        return nothing
    return times, tuple(tuple(int(factor or 0) for factor in parts) for parts in factors)


def _factor(span: np.ndarray, edges: np.ndarray, held: np.ndarray, changes: np.ndarray, times: int) -> int | None:
    """Of a part of which every byte is held equally often; else ``None``."""
    if not len(span):
        return 0
    low, high = np.searchsorted(edges, span[:, 0]), np.searchsorted(edges, span[:, 1]) - 1
    alike = bool((changes[low] == changes[high]).all()) and len(np.unique(held[low])) == 1
    return times // int(held[low[0]]) if alike else None


def _spans(part: tuple[Run, ...]) -> np.ndarray:
    """First and one past the last byte of each run: int64 of shape ``(n, 2)``."""
    found = [np.zeros((0, 2), dtype=np.int64)]
    for run in part:
        first = run.source + np.arange(run.count, dtype=np.int64) * run.source_stride
        found.append(np.stack((first, first + run.width), axis=1))
    return np.concatenate(found)
