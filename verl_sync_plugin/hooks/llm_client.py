# SPDX-License-Identifier: Apache-2.0
"""verl's client of separate rollouts: for servers that may die, and of which one call may span a sync."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from verl_sync_plugin.errors import HalfWrittenError
from verl_sync_plugin.log import say

_server: ContextVar[str] = ContextVar("_server", default="")
_first_versions: ContextVar[list[Any] | None] = ContextVar("_first_versions", default=None)


class _Outliving(LLMServerClient):
    """Asks another server for what one that has died was asked for, and the same one again where a sync has failed,
    which the driver runs again or ends the run; between verl's two clients."""

    async def _acquire_server(self, *args: Any, **kwargs: Any) -> Any:
        acquired = await super()._acquire_server(*args, **kwargs)
        _server.set(acquired[0])
        return acquired

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return await super().generate(*args, **kwargs)
            except (ActorUnavailableError, HalfWrittenError):  # no connection, or no weights, at the moment
                await asyncio.sleep(1)
            except ActorDiedError:
                # The one with the fewest requests gets the next one, which a dead server soon is
                say(f"rollout server {_server.get()} has died; its requests go to another one")
                await self._load_balancer.remove_servers.remote([_server.get()])
                await self._load_balancer.clear_sticky_cache.remote()


class OutlivingLLMServerClient(FullyAsyncLLMServerClient, _Outliving):
    """verl's client, for rollouts of which a replica may die."""


class _Noting(_Outliving):
    """Notes the version with which each part of a response began; between verl's two clients."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        output = await super().generate(*args, **kwargs)
        noted = _first_versions.get()
        if noted is not None:
            noted.append(output.extra_fields.get("min_global_steps"))
        return output


class SpanningLLMServerClient(FullyAsyncLLMServerClient, _Noting):
    """verl's client, whose ``min_global_steps`` is the version with which a response began.

    verl's takes each part's version when it ends for that of the whole part, which holds where every sync ends it.
    """

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        noted: list[Any] = []
        before = _first_versions.set(noted)
        try:
            output = await super().generate(*args, **kwargs)
        finally:
            _first_versions.reset(before)
        if noted and noted[0] is not None:
            output.extra_fields["min_global_steps"] = noted[0]
        return output


def of_separate_rollout(client: Any, pause: str) -> Any:
    """``client``, as ours where it is verl's that asks again for what was aborted.

    Args:
        client: verl's.
        pause: ``custom.sync.pause``.
    """
    if type(client) is not FullyAsyncLLMServerClient:
        return client
    ours = object.__new__(OutlivingLLMServerClient if pause == "abort" else SpanningLLMServerClient)
    ours.__dict__.update(vars(client))
    return ours
