# SPDX-License-Identifier: Apache-2.0
"""verl's client of separate rollouts, for servers of which one call may span a sync."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

_first_versions: ContextVar[list[Any] | None] = ContextVar("_first_versions", default=None)


class _Noting(LLMServerClient):
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


def spanning(client: Any) -> Any:
    """``client``, as ours where it is verl's that asks again for what was aborted."""
    if type(client) is not FullyAsyncLLMServerClient:
        return client
    ours = object.__new__(SpanningLLMServerClient)
    ours.__dict__.update(vars(client))
    return ours
