# SPDX-License-Identifier: Apache-2.0
"""SGLang's model classes behind a real receiver session in the process of the trainer rank beside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from verl_sync_plugin.rollouts.sglang import loader
from verl_sync_plugin.sync.endpoint import LoadOutcome, PendingLoad, RolloutEndpoint
from verl_sync_plugin.transport.channel import Channel, connect
from verl_sync_plugin.transport.protocol import LoadRequest

TIMEOUT = 20.0


class Engine(RolloutEndpoint):
    """One tensor-parallel rank of a replica, in this process. No rank can call another process's engine here, so every
    rank has its own loaded."""

    leader, restores_uncovered, ranks = True, False, ()

    def __init__(self, model: torch.nn.Module, tp: int) -> None:
        self.model, first = model, dist.get_rank() // tp * tp
        self.ranks = tuple(range(first, first + tp))

    async def resume(self, tags: list[str]) -> None: ...

    async def finish(self, tags: list[str]) -> None: ...

    async def abandon(self, why: str) -> None: ...

    async def publish(self, report: dict[str, Any]) -> None: ...

    async def load_adapter(self, settings: Mapping[str, Any], factors: Any, weight_version: str | None) -> LoadOutcome:
        raise AssertionError("whole weights move")

    def flush_behind_load(self) -> None: ...

    def start_load(self, request: LoadRequest, weight_version: str | None) -> PendingLoad:
        return _Load(self.model, request)


class _Load(PendingLoad):
    def __init__(self, model: torch.nn.Module, request: LoadRequest) -> None:
        self._thread = threading.Thread(target=self._run, args=(model, request), daemon=True)
        self._thread.start()

    def _run(self, model: torch.nn.Module, request: LoadRequest) -> None:
        channel: Channel = connect(request.addresses[loader.tensor_parallel_rank()], TIMEOUT, TIMEOUT)
        try:
            loader._receive(model, channel, request, forget=False)
        finally:
            channel.close()

    def finished(self) -> bool:
        return not self._thread.is_alive()

    async def outcome(self, timeout: float) -> LoadOutcome:
        await asyncio.to_thread(self._thread.join, timeout)
        return LoadOutcome()
