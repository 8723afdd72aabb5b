"""Sources of which only the group counts."""

from __future__ import annotations

import torch.distributed as dist

from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.trainers.base import ParameterSource


class WorldSource(ParameterSource):
    """Shares every base out over all ranks; the shards come from the test."""

    def __init__(self) -> None:
        super().__init__()
        self._group = dist.group.WORLD

    def shards(self) -> list[Shard]:
        raise AssertionError("not asked for")
