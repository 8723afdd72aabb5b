# SPDX-License-Identifier: Apache-2.0
"""Imported by verl in each of its processes: a server of a separate rollout says at the end of each pause who paused
it, and how many requests have stayed in its engine. All responses are as long as they may be."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import wrapt


def _patch(module: ModuleType) -> None:
    server = module.SyncSGLangHttpServer
    pause, resume, generate = server.abort_all_requests, server.resume_generation, server.generate

    async def generating(self: Any, *args: Any, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        return await generate(self, *args, sampling_params={**sampling_params, "ignore_eos": True}, **kwargs)

    async def abort_all_requests(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = await pause(self, *args, **kwargs)
        self.requests_inside = set(self.tokenizer_manager.rid_to_state)
        return answer

    async def resume_generation(self: Any) -> None:
        who = "its load" if self.paused_by_load else "a driver"
        stayed = getattr(self, "requests_inside", set()) & set(self.tokenizer_manager.rid_to_state)
        await resume(self)
        if self.separate:
            module.say(f"test: {self.pause} by {who}, {len(stayed)} requests stayed")

    server.abort_all_requests, server.resume_generation = abort_all_requests, resume_generation
    server.generate = generating


wrapt.register_post_import_hook(_patch, "verl_sync_plugin.rollouts.sglang.server")
