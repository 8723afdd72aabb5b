# SPDX-License-Identifier: Apache-2.0
"""A stand-in for SGLang's tokenizer manager, which needs its processes; and the calls of a sync."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

ABORTING = ["pause abort", "release kv_cache", "load load", "resume kv_cache", "flush", "continue"]


class Manager:
    """Notes what it is asked for; a request is answered when it is told to."""

    server_args = SimpleNamespace(tp_size=1, weight_version="", enable_weights_cpu_backup=False)

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.keys: list[Any] = []
        self.answers = asyncio.Event()
        self.closed = self.aborted = 0
        self.flushes = True
        self.model_update_lock = SimpleNamespace(is_locked=self._locked)

    async def _locked(self) -> bool:
        return self.closed < len(self.keys)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.aborted += 1

    async def pause_generation(self, obj: Any) -> None:
        self.asked.append(f"pause {obj.mode}")

    async def continue_generation(self, obj: Any) -> None:
        self.asked.append("continue")

    async def update_weights_from_tensor(self, obj: Any, request: None) -> tuple[bool, str]:
        self.asked.append(f"load {obj.load_format.rpartition('.')[2]}")
        return True, ""

    async def flush_cache(self) -> Any:
        self.asked.append("flush")
        return SimpleNamespace(success=self.flushes)

    async def release_memory_occupation(self, obj: Any, request: None) -> None:
        self.asked.append(f"release {' '.join(obj.tags)}")

    async def resume_memory_occupation(self, obj: Any, request: None) -> None:
        self.asked.append(f"resume {' '.join(obj.tags)}")

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        self.keys.append(obj.extra_key)
        try:
            await self.answers.wait()
            yield {"output_ids": [1], "meta_info": {"finish_reason": {"type": "length"}}}
        finally:
            self.closed += 1


async def synced(server: Any, version: int = 7) -> None:
    """verl's calls around a sync of a separate rollout, and ours in it."""
    await server.abort_all_requests()
    await server.release_kv_cache()
    await loaded(server, version)
    await server.resume_kv_cache()
    await server.resume_generation()


async def loaded(server: Any, version: int) -> None:
    await server.load_weights(("sync",), str(version))
    await server.flush_behind_load()
    await server.finish_sync([])
