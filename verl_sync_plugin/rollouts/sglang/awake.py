# SPDX-License-Identifier: Apache-2.0
"""Which memory of the engine is released: the state machine behind sleep and wake.

SGLang 0.5.12 raises ``KeyError`` on a resume without release, and its memory saver exits the process on a repeated
pause; asked through here, both are harmless.
"""

from __future__ import annotations

from collections.abc import Iterable

WEIGHTS = "weights"
KV_CACHE = "kv_cache"


class AwakeState:
    """The memory tags of an engine that are released now."""

    def __init__(self) -> None:
        self._released: set[str] = set()

    @property
    def released(self) -> frozenset[str]:
        return frozenset(self._released)

    def to_release(self, tags: Iterable[str]) -> list[str]:
        """The tags that are still resident, in the given order."""
        return [tag for tag in tags if tag not in self._released]

    def to_resume(self, tags: Iterable[str]) -> list[str]:
        """The tags that are released, in the given order."""
        return [tag for tag in tags if tag in self._released]

    def note_released(self, tags: Iterable[str]) -> None:
        self._released.update(tags)

    def note_resumed(self, tags: Iterable[str]) -> None:
        self._released.difference_update(tags)


def sleep_tags(keep_weights: bool = False) -> list[str]:
    """What an engine releases when it goes to sleep.

    Args:
        keep_weights: adapter mode; the base weights stay.
    """
    return [KV_CACHE] if keep_weights else [KV_CACHE, WEIGHTS]


def wake_stages(staged: bool) -> tuple[list[str], list[str]]:
    """(stage 1, stage 2): what is resumed before the weights are loaded, and after the trainer has made room.

    Args:
        staged: ``rollout.multi_stage_wake_up``; False resumes everything in stage 1.
    """
    return ([WEIGHTS], [KV_CACHE]) if staged else ([WEIGHTS, KV_CACHE], [])


def awake_behind_load(free_cache_engine: bool, stage_two: list[str]) -> bool:
    """Whether nothing of an engine is left to be resumed once it has loaded its weights.

    Args:
        free_cache_engine: ``rollout.free_cache_engine``; an engine without it never sleeps.
        stage_two: of ``wake_stages``.
    """
    return not (free_cache_engine and stage_two)
