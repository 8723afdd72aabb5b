# SPDX-License-Identifier: Apache-2.0
"""Sources of which only the group counts."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch.distributed as dist

from verl_sync_plugin.layout.tensors import Shard
from verl_sync_plugin.sync.ways import Sync, Way, Ways
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.transport.agreement import Agreement


class WorldSource(ParameterSource):
    """Shares every base out over all ranks; the shards come from the test."""

    def __init__(self, shards: Sequence[Shard] = ()) -> None:
        super().__init__()
        self.group = dist.group.WORLD
        self._shards = shards

    def shards(self) -> list[Shard]:
        return list(self._shards)


def everyone() -> tuple[int, ...]:
    """All ranks: what a ``WorldSource`` shares bases out over."""
    return tuple(range(dist.get_world_size()))


def chosen(ways: Ways, agreement: Agreement, sync: Sync) -> Way:
    """The way that the ranks vote for."""
    return ways.take(sync, agreement.vote("choosing the way", ways.votes(sync)).tolist())


class Wanted(dict[str, str]):
    """What an engine says that takes tensors of these patterns as the trainer has them; ``WirePolicy.kept``."""

    def __init__(self, *patterns: str) -> None:
        super().__init__()
        self._patterns = patterns

    def __contains__(self, name: object) -> bool:
        return any(re.search(pattern, str(name)) for pattern in self._patterns)

    def __missing__(self, name: str) -> str:
        return ""
