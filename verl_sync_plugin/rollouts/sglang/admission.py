# SPDX-License-Identifier: Apache-2.0
"""What stands before SGLang's requests, from verl as over HTTP: the gate, and what answers tell of their weights."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from fastapi import HTTPException

from verl_sync_plugin import compat
from verl_sync_plugin.errors import HalfWrittenError

UNAVAILABLE = 503
REST_SECONDS = 0.2  # for a step of its own SGLang still counts a request that it has answered as running
LONG_SECONDS = 1.0  # of waiting, behind which a client of HTTP's may be gone
Generate = Callable[..., AsyncIterator[Any]]


class Guarded:
    """Has every request that a tokenizer manager gets from now on wait until it may be computed.

    Args:
        tokenizer_manager: SGLang's, of one engine.
        admit: waits; raises HalfWrittenError where that is in vain, which HTTP's clients get as status 503. Where
            nothing is to be waited for it returns without letting anything else run.
        spans: a request may span a sync, and SGLang does not say so: ``weight_versions`` is put into the ``meta_info``
            of its answers beside SGLang's ``weight_version``, which is that of the last token alone.
        name: is put before the request's ``extra_key``, for SGLang shares a cached prefix among requests of the same
            key only; asked behind ``admit``, so that a request is named after the weights it begins with. May be empty.

    Attributes:
        inside: how many requests SGLang has.
    """

    def __init__(
        self, tokenizer_manager: Any, admit: Callable[[], Awaitable[None]], spans: bool, name: Callable[[], str]
    ) -> None:
        self._past_gate: Generate = tokenizer_manager.generate_request
        self._manager, self._admit, self._spans, self._name = tokenizer_manager, admit, spans, name
        self.inside, self._ended = 0, -REST_SECONDS
        tokenizer_manager.generate_request = self._generate_request

    @property
    def busy(self) -> bool:
        """Whether SGLang has a request, or may still count one as running that it has just answered."""
        return self.inside > 0 or time.monotonic() - self._ended < REST_SECONDS

    async def _generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        await self._enter(request)
        self.inside += 1
        try:
            _prefix_key(obj, self._name())
            began = compat.weight_version(self._manager) if self._spans else None
            async with aclosing(self._past_gate(obj, request)) as answers:  # type: ignore[type-var]
                async for answer in answers:
                    for each in answer if isinstance(answer, list) else (answer,):
                        _tell_versions(each, began)
                    yield answer
        finally:
            self.inside -= 1
            self._ended = time.monotonic()

    async def _enter(self, request: Any) -> None:
        """Hazard: between the end of ``admit`` and SGLang's own call nothing else may run, or a request would come into
        a sync that begins there."""
        asked = time.monotonic()
        try:
            await self._admit()
            if request is not None and time.monotonic() - asked > LONG_SECONDS:
                if await request.is_disconnected():  # SGLang looks for that only once it computes
                    raise HTTPException(UNAVAILABLE, "the client has gone")
                await self._admit()
        except HalfWrittenError as error:
            if request is None:
                raise
            raise HTTPException(UNAVAILABLE, str(error)) from error


def _prefix_key(obj: Any, prefix: str) -> None:
    if prefix and hasattr(obj, "extra_key"):
        given = obj.extra_key
        obj.extra_key = [prefix + (key or "") for key in given] if isinstance(given, list) else prefix + (given or "")


def _tell_versions(answer: Any, began: str | None) -> None:
    """Notes in an answer the versions of the first and the last weights that it is of; one where these are the same."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if meta is not None and began is not None:
        meta["weight_versions"] = list(dict.fromkeys((began, meta.get("weight_version", began))))
