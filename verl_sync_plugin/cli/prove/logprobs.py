# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of fixed prompts: what the engine says of the tokens that it chose, and what the trainer does."""

from __future__ import annotations

import torch

from verl_sync_plugin.spmd.rollout import SpmdRollout
from verl_sync_plugin.verify.canary import Apart, apart, canary_prompts

PROMPT_TOKENS = 12


@torch.no_grad()
def difference(rollout: SpmdRollout, model: torch.nn.Module, prompts: int, tokens: int) -> Apart:
    """How far the engine's log-probabilities are from the trainer's. Collective.

    Args:
        rollout: answers greedily.
        model: the trainer's, of transformers.
        prompts: how many; random tokens of the vocabulary, the same in every run.
        tokens: of each response.

    Returns:
        How far they are apart, over the tokens of the responses.
    """
    vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    asked = canary_prompts(vocabulary, prompts, PROMPT_TOKENS)
    answer = rollout.generate(asked, {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True})
    whole = torch.cat([answer.prompt_ids, answer.response_ids], dim=1)
    logits = model(input_ids=whole, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1].float()
    trained = torch.log_softmax(logits, -1).gather(-1, answer.response_ids[..., None])[..., 0]
    return apart(trained.tolist(), answer.log_probs.tolist())
