# SPDX-License-Identifier: Apache-2.0
"""SGLang's model of one scheduler rank, behind the interface that the receiver knows."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from verl_sync_plugin.receiver.engine_model import EngineModel
from verl_sync_plugin.rollouts.sglang.skips import skipped_by

# SGLang's DeepSeek loaders fuse these pairs inside one load_weights call; a pair torn over two calls leaves the fused
# weight stale without a word (the first of a pair waits for the second)
FUSED_PAIRS = (
    ("q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
    ("q_a_proj.weight_scale_inv", "kv_a_proj_with_mqa.weight_scale_inv"),
)


class SGLangModel(EngineModel):
    """Any model class of SGLang. Some write into the tensors that they are given (Gemma adds one to its norms)."""

    engine = "SGLang"
    fused_pairs = FUSED_PAIRS

    def __init__(self, module: Any, tp_rank: int) -> None:
        super().__init__(module, tp_rank)
        self._model = module  # for its methods, of which torch.nn.Module knows nothing
        self._why_skipped = skipped_by(module)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._model.load_weights(tensors)

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
        return self._why_skipped(name)
