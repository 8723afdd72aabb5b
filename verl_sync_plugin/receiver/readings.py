# SPDX-License-Identifier: Apache-2.0
"""Which bytes of each tensor this engine rank reads and hashes.

Ranks of an engine read different parts of a tensor (tensor parallelism), or all the same ones. So no rank alone can
compare its hash with what was sent; the trainer adds up all of them, and for that it must know how often each byte was
counted (``verify/hashes.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_sync_plugin.copies.hulls import Hull
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Entry
from verl_sync_plugin.receiver.copy_plan import Planned
from verl_sync_plugin.transport.protocol import Readings


def choose(hulls: Sequence[Sequence[Hull]], planned: dict[str, Planned], whole: frozenset[str]) -> dict[str, str]:
    """Whose copies hash the bytes of each tensor.

    Args:
        hulls: of all buckets.
        planned: the plan by name.
        whole: tensors that are to be hashed whole all the same.

    Returns:
        The name of a planned tensor by the name that a hull counts for. Hulls of a tensor that is not in it are hashed
        by a read of their own: the model loads it itself, casts it, or shares only some of its bytes with another.
    """
    names: dict[str, tuple[str, ...]] = {}
    unfit = set(whole)
    for hull in (hull for bucket in hulls for hull in bucket):
        owner = hull.names[0]
        if not hull.equal or names.setdefault(owner, hull.names) != hull.names:
            unfit.update(hull.names)
    chosen = {}
    for owner, sharers in names.items():
        if unfit.isdisjoint(sharers) and all(name in planned and not planned[name].casts for name in sharers):
            chosen[owner] = max(sharers, key=lambda name: _size(planned[name]))
    return chosen


def readings_of(
    buckets: Sequence[Sequence[Entry]],
    hulls: Sequence[Sequence[Hull]],
    numbers: dict[str, int],
    planned: dict[str, Planned],
    chosen: dict[str, str],
) -> Readings:
    """What this rank hashes of each tensor, tensors that are read alike together.

    Args:
        buckets: the entries of all buckets.
        hulls: of all buckets.
        numbers: of the tensors.
        planned: the plan by name.
        chosen: the result of ``choose``.
    """
    sizes = {entry.name: entry.nbytes for entries in buckets for entry in entries}
    found: dict[tuple[int, tuple[Run, ...]], list[int]] = {}
    for owner in dict.fromkeys(hull.names[0] for bucket in hulls for hull in bucket):
        runs = _read(planned[chosen[owner]]) if owner in chosen else (Run(0, 0, sizes[owner]),)
        found.setdefault((sizes[owner], runs), []).append(numbers[owner])
    return tuple((nbytes, runs, tuple(tensors)) for (nbytes, runs), tensors in found.items())


def _size(planned: Planned) -> int:
    return sum(run.width * run.count for run in planned.runs)


def _read(planned: Planned) -> tuple[Run, ...]:
    found = []
    for run in planned.runs:
        joined = run.count == 1 or run.source_stride == run.width
        rest = (run.width * run.count,) if joined else (run.width, run.count, run.source_stride)
        found.append(Run(run.source, 0, *rest))
    return tuple(sorted(found))
