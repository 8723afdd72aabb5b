# SPDX-License-Identifier: Apache-2.0
"""Imported by verl in each of its processes: one rollout rank of a separate rollout dies in the middle of a sync."""

from __future__ import annotations

import os
import signal
from types import ModuleType
from typing import Any

import wrapt

LAST_RANK, SYNC = 4, 3  # of two trainer ranks and two replicas; the sync after the second step


def _patch(module: ModuleType) -> None:
    commit = module.ShardingManager._commit

    async def run(self: Any, *args: Any) -> Any:
        ranks = self.agreement.ranks
        if ranks.size == LAST_RANK and ranks.rank == LAST_RANK - 1:
            self.syncs = getattr(self, "syncs", 0) + 1
            if self.syncs == SYNC:
                os.kill(os.getpid(), signal.SIGKILL)
        return await commit(self, *args)

    module.ShardingManager._commit = run


wrapt.register_post_import_hook(_patch, "verl_sync_plugin.sync.manager")
