# SPDX-License-Identifier: Apache-2.0
"""``custom.sync.verify``: decides which syncs are verified."""

from __future__ import annotations

FIRST_SYNCS = 3  # verified by ``custom.sync.verify=first``
MOST_TRIES = 10  # of a sync that is not verified whole for want of memory; each costs a load of marks


class Cadence:
    """Decides which syncs are verified; the same on all ranks of a trainer, which count the same syncs."""

    def __init__(self, verify: str | int) -> None:
        self._verify = verify
        self._ended: dict[str, int] = {}
        self._tries: dict[str, int] = {}

    def due(self, digest: str) -> bool:
        """True if the next sync of a plan is to be verified."""
        ended = self._ended.get(digest, 0)
        if isinstance(self._verify, int):
            return ended % self._verify == 0
        return self._verify == "always" or (self._verify == "first" and ended < FIRST_SYNCS)

    def note(self, digest: str, whole: bool = True) -> None:
        """Counts a sync of a plan that has ended well; one that was not verified ``whole`` is made up for by the
        next."""
        if not whole and self._tries.get(digest, 0) < MOST_TRIES:
            self._tries[digest] = self._tries.get(digest, 0) + 1
            return
        self._ended[digest] = self._ended.get(digest, 0) + 1
