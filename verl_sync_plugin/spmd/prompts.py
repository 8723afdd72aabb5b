# SPDX-License-Identifier: Apache-2.0
"""Token ids into the engine, padded tensors out of it; nothing is made text."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Prompts = Sequence[Sequence[int]] | torch.Tensor
Answered = tuple[list[int], list[float], str]


@dataclass(frozen=True)
class Generated:
    """Prompts and responses of one ``generate``, the same on all ranks of an engine; on the rank's device.

    ``N`` is prompts times ``n``, the responses to one prompt next to each other; ``P`` and ``R`` are the longest prompt
    and the longest response.

    Attributes:
        prompt_ids: int64 of shape ``(N, P)``, padded on the left.
        prompt_mask: bool of shape ``(N, P)``; False where padded.
        response_ids: int64 of shape ``(N, R)``, padded on the right.
        response_mask: bool of shape ``(N, R)``; False where padded. The token that ended a response counts.
        log_probs: float32 of shape ``(N, R)``: of each response token, as the engine computed it when it chose the
            token; 0.0 where padded.
        finish_reasons: ``stop``, ``length`` or ``abort``, for each response.
        version: of the weights, as ``sync_weights`` counts; ``None`` before the first sync.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    response_ids: torch.Tensor
    response_mask: torch.Tensor
    log_probs: torch.Tensor
    finish_reasons: tuple[str, ...]
    version: int | None

    @property
    def ids(self) -> torch.Tensor:
        """Prompts and responses: int64 of shape ``(N, P + R)``."""
        return torch.cat([self.prompt_ids, self.response_ids], 1)

    @property
    def mask(self) -> torch.Tensor:
        """bool of shape ``(N, P + R)``."""
        return torch.cat([self.prompt_mask, self.response_mask], 1)


@dataclass(frozen=True)
class Request:
    """A request of the engine, one entry per response."""

    prompts: list[list[int]]
    sampling: list[dict[str, Any]]

    @property
    def digest(self) -> str:
        """Names it among the ranks of an engine."""
        return hashlib.sha256(pickle.dumps((self.prompts, self.sampling))).hexdigest()


def request_of(
    token_ids: Prompts, sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, mask: torch.Tensor | None
) -> Request:
    """Checks and writes out what a script asks; arguments of ``SpmdRollout.generate``.

    Raises:
        ValueError: names the argument, its value and the remedy.
    """
    prompts = _prompts(token_ids, mask)
    if not prompts:
        raise ValueError("token_ids=[]: no prompts. Give at least one on every rank.")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"token_ids[{index}] has no tokens. Give every prompt at least one.")
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in prompt):
            raise ValueError(f"token_ids[{index}]={prompt[:8]}…: not token ids. Use whole numbers from 0 on.")
    each = [dict(sampling or {})] * len(prompts) if sampling is None or isinstance(sampling, Mapping) else sampling
    if len(each) != len(prompts):
        raise ValueError(
            f"sampling: {len(each)} entries for {len(prompts)} prompts. Give one mapping, or one for each."
        )
    request = Request([], [])
    for prompt, settings in zip(prompts, each, strict=True):
        given = dict(settings)
        times = given.pop("n", 1)
        if isinstance(times, bool) or not isinstance(times, int) or times < 1:
            raise ValueError(f"sampling['n']={times!r}: use a number of responses from 1 on.")
        for unserved in ("stop", "stop_regex", "min_new_tokens", "json_schema", "regex", "ebnf"):
            if given.get(unserved):
                remedy = "Use stop_token_ids." if unserved.startswith("stop") else "Leave it out."
                raise ValueError(f"sampling[{unserved!r}]={given[unserved]!r}: needs a tokenizer. {remedy}")
        request.prompts.extend([prompt] * times)
        request.sampling.extend([given] * times)
    return request


def _prompts(token_ids: Prompts, mask: torch.Tensor | None) -> list[list[int]]:
    if not isinstance(token_ids, torch.Tensor):
        if mask is not None:
            raise ValueError("attention_mask: goes with a padded tensor of token_ids; leave it out for lists.")
        return [list(prompt) for prompt in token_ids]
    if token_ids.dim() != 2 or token_ids.is_floating_point():
        raise ValueError(
            f"token_ids of {token_ids.dtype} and shape {tuple(token_ids.shape)}: use whole numbers of shape (N, P)."
        )
    if mask is None:
        return token_ids.tolist()
    if mask.shape != token_ids.shape:
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)}: use that of token_ids, {tuple(token_ids.shape)}."
        )
    return [row[kept.bool()].tolist() for row, kept in zip(token_ids.cpu(), mask.cpu(), strict=True)]


def padded(
    request: Request, answered: Sequence[Answered], pad: int, version: int | None, device: torch.device
) -> Generated:
    """The tensors of one ``generate``.

    Args:
        request: what was asked.
        answered: one for each of its prompts.
        pad: token id in padded places.
        version: of the weights.
        device: where the tensors go.
    """
    prompts = [torch.tensor(prompt) for prompt in request.prompts]
    responses = [torch.tensor(tokens, dtype=torch.int64) for tokens, _, _ in answered]
    log_probs = [torch.tensor(values, dtype=torch.float32) for _, values, _ in answered]
    pad_sequence = torch.nn.utils.rnn.pad_sequence
    return Generated(
        pad_sequence(prompts, True, pad, padding_side="left").to(device),
        pad_sequence([torch.ones(len(p), dtype=torch.bool) for p in prompts], True, 0, padding_side="left").to(device),
        pad_sequence(responses, True, pad).to(device),
        pad_sequence([torch.ones(len(r), dtype=torch.bool) for r in responses], True, 0).to(device),
        pad_sequence(log_probs, True, 0.0).to(device),
        tuple(reason for _, _, reason in answered),
        version,
    )
