# SPDX-License-Identifier: Apache-2.0
"""Imported by verl in each of its processes: a scheduler of SGLang dies in one replica of a separate rollout, while
that is being synced."""

from __future__ import annotations

import os
import signal
from types import ModuleType
from typing import Any

import psutil
import wrapt

LAST_REPLICA, SYNC = 3, 3  # the sync after the second step


def _patch(module: ModuleType) -> None:
    honest = module.WeightUpdates.load_weights

    async def load_weights(self: Any, *args: Any) -> Any:
        self.loads_begun = getattr(self, "loads_begun", 0) + 1
        if self.replica_rank == LAST_REPLICA and self.loads_begun == SYNC:
            named = {process.pid: psutil.Process(process.pid).name() for process in self._processes}
            (scheduler,) = (pid for pid, name in named.items() if "scheduler" in name)
            os.kill(scheduler, signal.SIGKILL)
        return await honest(self, *args)

    module.WeightUpdates.load_weights = load_weights


wrapt.register_post_import_hook(_patch, "verl_sync_plugin.rollouts.sglang.updates")
