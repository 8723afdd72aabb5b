# SPDX-License-Identifier: Apache-2.0
"""SGLang's model of one scheduler rank, behind the interface that the receiver knows."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from verl_sync_plugin.layout.names import layers_of
from verl_sync_plugin.receiver.engine_model import EngineModel
from verl_sync_plugin.rollouts.sglang.skips import why_skipped

# SGLang's DeepSeek loaders fuse these pairs inside one load_weights call; a pair torn over two calls leaves the fused
# weight stale without a word (the first of a pair waits for the second)
FUSED_PAIRS = (
    ("q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
    ("q_a_proj.weight_scale_inv", "kv_a_proj_with_mqa.weight_scale_inv"),
)

# A tied model's one weight as checkpoints have it, and its second name, which most checkpoints leave out
EMBEDDING = re.compile(r"(?:[a-z_]+\.)*embed_tokens\.weight")
HEAD = "lm_head.weight"


class SGLangModel(EngineModel):
    """Any model class of SGLang. Some write into the tensors that they are given (Gemma adds one to its norms)."""

    engine = "SGLang"
    fused_pairs = FUSED_PAIRS

    def __init__(self, module: Any, tp_rank: int) -> None:
        super().__init__(module, tp_rank)
        self._model = module  # for its methods, of which torch.nn.Module knows nothing
        self._copies_tied = copies_tied(module)

    @property
    def layers(self) -> int:
        return layers_of(getattr(self._model, "config", None))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._model.load_weights(self._under_both_names(tensors) if self._copies_tied else tensors)

    def _under_both_names(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name, tensor
            if EMBEDDING.fullmatch(name) and HEAD not in self.sent:
                yield HEAD, tensor

    @property
    def can_derive(self) -> bool:
        return hasattr(self._model, "post_load_weights")

    def derive_after_load(self) -> None:
        self._model.post_load_weights()

    def layout_token(self) -> tuple[object, ...]:
        """Which expert is where: SGLang's load balancing moves experts between the places of a parameter that stays
        where it is."""
        module = sys.modules.get("sglang.srt.eplb.expert_location")
        metadata = None if module is None else module.get_global_expert_location_metadata()
        return () if metadata is None else tuple(metadata.physical_to_logical_map_cpu.flatten().tolist())

    def why_skipped(self, name: str) -> str:
        return why_skipped(self._model, name, self.sent)


def copies_tied(module: torch.nn.Module) -> bool:
    """Whether embedding and head are tied by the configuration, and two parameters in SGLang's class all the same.

    Its own load then leaves the head as it was allocated, for a tied checkpoint has none.
    """
    config = getattr(module, "config", None)
    tied = getattr(getattr(config, "text_config", None) or config, "tie_word_embeddings", False)
    head = getattr(getattr(module, "lm_head", None), "weight", None)
    others = (each for name, each in module.named_parameters(remove_duplicate=False) if not name.startswith("lm_head."))
    return bool(tied) and head is not None and all(each is not head for each in others)
