# SPDX-License-Identifier: Apache-2.0
"""The canary in SGLang: log-probabilities of prompts, asked of its tokenizer manager past the gate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from verl_sync_plugin.rollouts.sglang.admission import Generate

IDLE_SECONDS = 20.0
Scores = tuple[list[list[float]], list[list[float]], list[list[float]]]


async def score(
    manager: Any,
    prompts: list[list[int]],
    response_tokens: int,
    adapter: str | None,
    wanted: Callable[[], None] = lambda: None,
    generate: Generate | None = None,
) -> Scores:
    """What SGLang says of prompts, read and decoded. All its memory is awake; nobody else's requests are let in.

    Args:
        manager: SGLang's tokenizer manager.
        prompts: token ids.
        response_tokens: how many it decodes behind each prompt, greedily.
        adapter: name of the adapter that it serves; ``None`` without one.
        wanted: is called before every request, and raises once the trainer has given the sync up.
        generate: its ``generate_request`` past the gate; ``None`` where no gate stands before it.

    Returns:
        The fields of ``Scored``, in their order.

    Raises:
        RuntimeError: SGLang did not score every token, or does not come to rest behind it, or the sync was given up.
        ValueError: SGLang refuses the prompts.
    """
    ask = partial(_ask, manager, generate or manager.generate_request)
    wanted()
    answers = await ask(prompts, response_tokens, adapter)
    longer = [[*prompt, *answer["output_ids"]] for prompt, answer in zip(prompts, answers, strict=True)]
    wanted()
    again = await ask(longer, 1, adapter)
    read = [_log_probs(answer, "input_token_logprobs") for answer in answers]
    decoded = [_log_probs(answer, "output_token_logprobs") for answer in answers]
    rescored = [_log_probs(answer, "input_token_logprobs")[-response_tokens:] for answer in again]
    return [each[1:] for each in read], decoded, rescored  # of its first token SGLang has no log-probability


async def _ask(
    manager: Any, generate: Generate, prompts: list[list[int]], tokens: int, adapter: str | None
) -> list[dict[str, Any]]:
    # With logprob_start_len=0 SGLang reads the whole prompt, also where its beginning is cached
    request = GenerateReqInput(
        input_ids=prompts,
        sampling_params={"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
        lora_path=adapter,
    )
    try:
        answers: list[dict[str, Any]] = await anext(generate(request, None))
    finally:  # also where SGLang refuses one of several prompts, and answers the others
        await rest(manager)
    return answers


async def rest(manager: Any) -> None:
    """Waits until SGLang flushes: for a moment it still counts a request that it has answered as running. Then
    ``finish_sync`` would take that for somebody's, and SGLang would end if it were put to sleep."""
    deadline = time.monotonic() + IDLE_SECONDS
    while not getattr(await manager.flush_cache(), "success", True):
        if time.monotonic() > deadline:
            raise RuntimeError("SGLang could not flush its cache: requests are still running")
        await asyncio.sleep(0.01)


def _log_probs(answer: dict[str, Any], key: str) -> list[float]:
    found = [item[0] for item in answer["meta_info"][key]]
    return [float("nan") if value is None else float(value) for value in found]
