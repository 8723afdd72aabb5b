# SPDX-License-Identifier: Apache-2.0
"""The cells of the matrix: which fault happens where, at which stage, in which sync, and how long that may take."""

import itertools
from dataclasses import dataclass

from faults.points import POINTS

T = 8.0  # custom.sync.timeout_seconds
SLACK_SECONDS = 4.0  # of the ranks, in place of a minute
GROUP_SECONDS = 34.0  # how long torch.distributed waits in a collective of the trainer's own
SPARE_SECONDS = 5.0  # for a busy machine, on top of what the product's own bounds add up to

KINDS = ("error", "oom", "slow", "kill", "stop")
SYNCS = ("first", "second", "in place")
OUTSIDE_LOADER = ("wake", "finish")  # what an engine rank does then, SGLang does
LOADED = ("verify", "compare", "finish")  # the engine has all weights by then


@dataclass(frozen=True)
class Cell:
    place: str  # whose process it happens in
    stage: str
    kind: str  # "error" and "oom" are raised, "slow" sleeps, "kill" and "stop" are signals to itself
    sync: str  # "first" loads the model's own way, "second" replays out of staging memory, "in place" reads in place

    def __str__(self) -> str:
        return "-".join((self.kind, self.stage.replace(" ", "_"), self.place, self.sync))

    @property
    def ends_sglang(self) -> bool:
        """SGLang takes an exception of its scheduler outside of a loader for fatal, and ends all its processes."""
        return self.place == "engine" and self.stage in OUTSIDE_LOADER and self.kind in ("error", "oom")

    @property
    def heard_by(self) -> int:
        """The trainer rank that hears of it first: the engine rank's own, or the one that leads and asks the server."""
        beside = self.place == "engine" and self.stage not in OUTSIDE_LOADER
        return 1 if beside or self.place == "trainer" else 0

    @property
    def unheard(self) -> bool:
        """An engine rank that cannot connect can tell no trainer rank: the one next to it waits in vain."""
        return self.place == "engine" and self.stage == "connect" and self.kind in ("error", "oom")

    @property
    def group_is_lost(self) -> bool:
        """A trainer rank was away for longer than the others wait."""
        return self.place in ("leader", "trainer") and self.kind in ("kill", "stop")

    @property
    def bound(self) -> float:
        """Seconds that the sync may take: see the table in docs/failures.md."""
        leaving = T + SPARE_SECONDS  # the server hears of it, and the engine leaves the load
        together = 3 * T + SLACK_SECONDS
        return leaving + (together if self.group_is_lost else T * (self.unheard or self.kind in ("stop", "kill")))

    @property
    def must_restart(self) -> bool:
        return self.kind == "kill" or self.group_is_lost or self.ends_sglang


def matrix() -> list[Cell]:
    """Chooses cells greedily so that every possible pair of values occurs, and every kind in every place and sync."""
    where = [(place, stage) for place, stages in POINTS.items() for stage in stages]
    left = [Cell(*each, kind, sync) for each in where for kind, sync in itertools.product(KINDS, SYNCS)]
    missing = {values for cell in left for values in _covers(cell)}
    chosen = []
    while missing:
        best = max(left, key=lambda cell: len(_covers(cell) & missing))
        chosen.append(best)
        missing -= _covers(best)
    return sorted(chosen, key=lambda cell: cell.must_restart)  # one world lasts for all those that leave it whole


def _covers(cell: Cell) -> set[tuple[tuple[str, str], ...]]:
    values = {"place": cell.place, "stage": cell.stage, "kind": cell.kind, "sync": cell.sync}
    triples = [tuple((name, values[name]) for name in ("place", "kind", "sync"))]
    if cell.place in ("engine", "server") and cell.stage == "verify":  # every kind, where it works for the engine
        triples.append(tuple((name, values[name]) for name in ("place", "stage", "kind")))
    return {*triples, *itertools.combinations(values.items(), 2)}
