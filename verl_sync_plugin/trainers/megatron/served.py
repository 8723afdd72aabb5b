# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter of Megatron-Bridge that the engine serves itself: the bridge's own export of it, once per sync.

The factors are small, and which rows of them belong to which HF module is the bridge's knowledge; so its stream is
taken as it is, behind the guard that keeps a failing rank from hanging the others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch

from verl_sync_plugin.trainers.base import ServedAdapter
from verl_sync_plugin.trainers.megatron.guard import Guard
from verl_sync_plugin.trainers.megatron.model import unwrapped
from verl_sync_plugin.trainers.megatron.stream import Stream

_PEFT_PREFIX = "base_model.model."


class BridgeAdapter(ServedAdapter):
    """Args: ``chunks``: Megatron's model chunks; ``open_stream``: the adapter's tensors by HF name; ``lora``:
    ``actor_rollout_ref.model.lora``; ``timeout_seconds``: bound on waiting for other ranks."""

    def __init__(
        self, chunks: list[torch.nn.Module], open_stream: Callable[[], Stream], lora: Any, timeout_seconds: float
    ) -> None:
        from verl.utils.megatron_peft_utils import build_peft_config_for_vllm

        self._chunks = chunks
        self._open = open_stream
        self._guard = Guard(timeout_seconds)
        self.settings = build_peft_config_for_vllm(lora)

    def look(self) -> None:
        """See ``ServedAdapter``: whatever is trained beside the adapter would stay as it is in the engine."""
        for chunk in map(unwrapped, self._chunks):
            trained = [n for n, p in chunk.named_parameters() if p.requires_grad and p.numel() and ".adapter." not in n]
            if getattr(chunk.config, "moe_router_enable_expert_bias", False):
                trained += [name for name, _ in chunk.named_buffers() if name.endswith("expert_bias")]
            if trained:
                raise ValueError(
                    f"actor_rollout_ref.model.lora.merge=False: {trained[0]!r} changes in training, but is no part of "
                    "the adapter, so the engine would not get it. Set actor_rollout_ref.model.lora.merge=True."
                )

    def gather(self, run: str) -> Generator[None, None, dict[str, torch.Tensor]]:
        """See ``ServedAdapter``."""
        yield
        self._guard.begin(run)
        with self._guard.watching():
            found = {name: tensor.detach() for name, tensor, *_ in self._open()}
        return {f"{_PEFT_PREFIX}{name}": tensor for name, tensor in found.items()}

    def release(self) -> None:
        """See ``ServedAdapter``; nothing is kept."""
