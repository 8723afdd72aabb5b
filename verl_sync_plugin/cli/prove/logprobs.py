# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of fixed prompts: the engine's of the tokens that it chose, and the trainer's of the same."""

from __future__ import annotations

import torch

from verl_sync_plugin.spmd.rollout import SpmdRollout

PROMPT_TOKENS = 12
SEED = 7


@torch.no_grad()
def differences(rollout: SpmdRollout, model: torch.nn.Module, prompts: int, tokens: int) -> torch.Tensor:
    """Absolute differences between the engine's log-probabilities and the trainer's, one per response token.
    Collective. What is no number counts as infinitely far.

    Args:
        rollout: answers greedily.
        model: the trainer's, of transformers.
        prompts: how many; random token ids, the same in every run.
        tokens: of each response.
    """
    # From the lower half of the vocabulary: tokens that stand for images and the like are at its end
    vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    generator = torch.Generator().manual_seed(SEED)
    asked = torch.randint(0, max(1, vocabulary // 2), (prompts, PROMPT_TOKENS), generator=generator).tolist()
    answer = rollout.generate(asked, {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True})
    whole = torch.cat([answer.prompt_ids, answer.response_ids], dim=1)
    logits = model(input_ids=whole, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1].float()
    trained = torch.log_softmax(logits, -1).gather(-1, answer.response_ids[..., None])[..., 0]
    return (trained - answer.log_probs).abs().nan_to_num(nan=float("inf")).flatten()
