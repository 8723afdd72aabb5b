# SPDX-License-Identifier: Apache-2.0
"""What stands before SGLang's requests, from verl as over HTTP: the gate, and what answers tell of their weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from fastapi import HTTPException

from verl_sync_plugin import compat
from verl_sync_plugin.errors import HalfWrittenError

UNAVAILABLE = 503
Generate = Callable[..., AsyncIterator[Any]]


def guard(
    tokenizer_manager: Any, admit: Callable[[], Awaitable[None]], spans: bool = False, name: Callable[[], str] = str
) -> Generate:
    """Has every request that a tokenizer manager gets from now on wait until it may be computed.

    Args:
        tokenizer_manager: SGLang's, of one engine.
        admit: waits; raises HalfWrittenError where that is in vain, which HTTP's clients get as status 503.
        spans: a request may span a sync, so ``weight_versions`` stands in the ``meta_info`` of its answers beside
            SGLang's ``weight_version``, which is that of the last token alone.
        name: is put before the request's ``extra_key``, for SGLang shares a cached prefix among requests of the same
            key only; asked behind ``admit``, so that a request is named after the weights it begins with. May be empty.

    Returns:
        SGLang's own ``generate_request``, for whoever may pass.
    """
    generate: Generate = tokenizer_manager.generate_request

    async def generate_request(obj: Any, request: Any = None) -> AsyncIterator[Any]:
        try:
            await admit()
        except HalfWrittenError as error:
            if request is None:
                raise
            raise HTTPException(UNAVAILABLE, str(error)) from error
        _prefix_key(obj, name())
        began = compat.weight_version(tokenizer_manager) if spans else None
        async with aclosing(generate(obj, request)) as answers:  # type: ignore[type-var]
            async for answer in answers:
                for each in answer if isinstance(answer, list) else (answer,):
                    _tell_versions(each, began)
                yield answer

    tokenizer_manager.generate_request = generate_request
    return generate


def _prefix_key(obj: Any, prefix: str) -> None:
    if prefix and hasattr(obj, "extra_key"):
        given = obj.extra_key
        obj.extra_key = [prefix + (key or "") for key in given] if isinstance(given, list) else prefix + (given or "")


def _tell_versions(answer: Any, began: str | None) -> None:
    """Notes in an answer the versions of the first and the last weights that it is of; one where these are the same."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if meta is not None and began is not None:
        meta["weight_versions"] = list(dict.fromkeys((began, meta.get("weight_version", began))))
