# SPDX-License-Identifier: Apache-2.0
"""Which bytes of every sent tensor the engine's model takes in.

An engine may leave out a name that it does not know without a word. So each engine rank says what its model does with
every tensor, from the recording of its load, before anything is loaded; the trainer ranks put this together over the
ranks of an engine, each of which needs a part, and refuse a sync of which any byte would go nowhere
(``verify/uses.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from verl_sync_plugin.copies.hulls import hulls_of
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Entry
from verl_sync_plugin.receiver.order import superseded
from verl_sync_plugin.receiver.recording import Recording, Source
from verl_sync_plugin.transport.protocol import Readings

MOST_RUNS = 1 << 16

Runs = tuple[Run, ...]
Skipped = Callable[[str], str]  # EngineModel.why_skipped


def uses_in(recording: Recording, sources: Sequence[Source]) -> dict[str, Runs] | None:
    """The bytes of each tensor that a recorded load copies, or makes something of that the model gets; not what another
    tensor then overwrites.

    Args:
        recording: of one load.
        sources: the tensors that were given to it.

    Returns:
        Runs by name, none for a tensor that was left alone; ``None`` when the load did not come to its end, so that
        what it would have used is unknown.
    """
    if not recording.ended:
        return None
    found: dict[str, set[Run]] = {source.name: set() for source in sources}
    copied: dict[str, list[torch.Tensor]] = {}
    lost = superseded(recording.copies)
    for copy in recording.copies:
        if copy.order not in lost:
            copied.setdefault(copy.name, []).append(copy.source)
    # A spoiled recording has not seen all that the model gets
    taken = recording.refused.keys() if recording.spoiled else recording.taken
    for source in sources:
        if source.name in taken:
            found[source.name].update(own_runs(source))
        for view in copied.get(source.name, ()):
            found[source.name].update(own_runs(source) if (runs := _runs(view)) is None else runs)
    return {name: tuple(sorted(runs)) for name, runs in found.items()}


def readings_of_uses(
    uses: Mapping[str, Runs],
    sources: Sequence[Source],
    buckets: Sequence[Sequence[Entry]],
    numbers: Mapping[str, int],
    skipped: Skipped,
) -> Readings:
    """``uses`` by tensor number; tensors of equal size and equal runs share an entry. Sizes leave out gaps.

    Tied tensors travel once under several names and are used together: the bytes of a head that the engine ties to its
    embedding arrive in the embedding. What the engine skips with a reason counts as used.

    Args:
        uses: the result of ``uses_in``, or what ``use_teller.Touched`` has seen.
        sources: all tensors.
        buckets: the entries of all buckets.
        numbers: of the tensors.
        skipped: what the model rightly leaves alone.
    """
    by_name = {source.name: source for source in sources}
    shared = {name: set(runs) for name, runs in uses.items()}
    for hull in (hull for entries in buckets for hull in hulls_of(entries) if len(hull.names) > 1 and hull.equal):
        alike = [name for name in hull.names if by_name[name].layout == by_name[hull.names[0]].layout]
        for name in alike:
            shared[name].update(run for other in alike for run in uses[other])
    found: dict[tuple[int, Runs], list[int]] = {}
    for name, number in numbers.items():
        runs = tuple(sorted(shared[name])) or (own_runs(by_name[name]) if skipped(name) else ())
        found.setdefault((by_name[name].nbytes, runs), []).append(number)
    return tuple((nbytes, runs, tuple(alike)) for (nbytes, runs), alike in found.items())


def own_runs(source: Source) -> Runs:
    """The bytes of all elements of a tensor; one with gaps has other tensors' bytes in between."""
    runs = _runs(source.meta())
    return tuple(runs) if runs is not None else (Run(0, 0, source.nbytes),)


def _runs(view: torch.Tensor) -> list[Run] | None:
    """The bytes of a view of a tensor that starts at its storage's first byte, in any order; ``None``: too many runs.

    A copy in so many runs is no part that a rank chose for itself, so it counts as one of the whole tensor.
    """
    width = 1
    outer: list[tuple[int, int]] = []
    for stride, count in sorted((s, n) for s, n in zip(view.stride(), view.shape, strict=True) if n > 1 and s > 0):
        if stride == width and not outer:
            width *= count
        elif outer and stride == outer[-1][0] * outer[-1][1]:
            outer[-1] = outer[-1][0], outer[-1][1] * count
        else:
            outer.append((stride, count))
    if not view.numel():
        return []
    step, count = outer.pop(0) if outer else (0, 1)
    starts = [int(view.storage_offset())]
    for stride, many in outer:
        if len(starts) * many > MOST_RUNS:
            return None
        starts = [start + index * stride for start in starts for index in range(many)]
    size = view.element_size()
    return [Run(start * size, 0, width * size, count, step * size) for start in starts]
