# SPDX-License-Identifier: Apache-2.0
"""How long the matrix lets every wait last, and what that makes of the sync of a cell."""

from __future__ import annotations

from faults.cells import Cell

T = 8.0  # custom.sync.timeout_seconds
SLACK_SECONDS = 4.0  # of the ranks, in place of a minute
GROUP_SECONDS = 34.0  # how long torch.distributed waits in a collective of the trainer's own
SLOW_SECONDS = 1.5
SPARE_SECONDS = 5.0  # of a busy machine, beside what the product's own bounds add up to


def bound(cell: Cell) -> float:
    """Seconds that the sync of a cell may take: see the table in docs/design/failures.md."""
    leaving = T + SPARE_SECONDS  # the server is told, and the engine leaves the load
    together = 3 * T + SLACK_SECONDS
    return leaving + (together if cell.group_is_lost else T if cell.unheard or cell.kind in ("stop", "kill") else 0)
