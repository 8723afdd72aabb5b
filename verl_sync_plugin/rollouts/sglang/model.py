# SPDX-License-Identifier: Apache-2.0
"""SGLang's model of one scheduler rank, behind the interface that the receiver knows."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.receiver.engine_model import EngineModel
from verl_sync_plugin.rollouts.sglang.arguments import ARGUMENTS
from verl_sync_plugin.rollouts.sglang.skips import skipped_by

# SGLang's DeepSeek loaders fuse these pairs inside one load_weights call; a pair torn over two calls leaves the fused
# weight stale without a word (the first of a pair waits for the second)
FUSED_PAIRS = (
    ("q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
    ("q_a_proj.weight_scale_inv", "kv_a_proj_with_mqa.weight_scale_inv"),
    # DeepSeek-V4's
    *(
        (f"{attention}.{one}", f"{attention}.{other}")
        for attention in ("self_attn", "attn")
        for one, other in (
            ("wq_a.weight", "wkv.weight"),
            ("wq_a.scale", "wkv.scale"),
            ("wq_a.weight_scale_inv", "wkv.weight_scale_inv"),
            ("compressor.wkv.weight", "compressor.wgate.weight"),
            ("indexer.compressor.wkv.weight", "indexer.compressor.wgate.weight"),
        )
    ),
)


class SGLangModel(EngineModel):
    """Any model class of SGLang. Some write into the tensors that they are given (Gemma adds one to its norms)."""

    engine = "SGLang"
    fused_pairs = FUSED_PAIRS
    plain_layout = f"Set +{ARGUMENTS}.moe_runner_backend=triton, or {TURN_OFF}, which does not notice."

    def __init__(self, module: Any, tp_rank: int) -> None:
        super().__init__(module, tp_rank)
        self._model = module  # for its methods, of which torch.nn.Module knows nothing
        self._why_skipped = skipped_by(module)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with _every_replica():
            self._model.load_weights(tensors)

    def after_load(self) -> None:
        for _, module in self.module.named_modules():
            method: Any = getattr(module, "quant_method", None)
            if method is not None and not hasattr(module, "base_layer"):  # a layer's adapter has the method, too
                method.process_weights_after_loading(module)

    @property
    def can_derive(self) -> bool:
        return hasattr(self._model, "post_load_weights")

    def derive_after_load(self) -> None:
        self._model.post_load_weights()

    def layout_token(self) -> tuple[object, ...]:
        """Which expert is where: SGLang's load balancing moves experts between the places of a parameter that stays
        where it is."""
        metadata = _expert_locations()
        return () if metadata is None else tuple(metadata.physical_to_logical_map_cpu.flatten().tolist())

    def why_skipped(self, name: str) -> str:
        return self._why_skipped(name)


def _expert_locations() -> Any:
    """SGLang's own; ``None`` where experts are not moved."""
    module = sys.modules.get("sglang.srt.eplb.expert_location")
    return None if module is None else module.get_global_expert_location_metadata()


@contextmanager
def _every_replica() -> Iterator[None]:
    """Context in which a load writes every replica of an expert.

    SGLang's loaders ask where an expert is, and get the replica that requests are sent to: of two on one GPU the other
    keeps its old weights.
    """
    locations = _expert_locations()
    nearest = getattr(locations, "logical_to_all_physical", None)
    if nearest is None:
        yield
        return

    def every(layer_id: int, logical_expert_id: int, require_global_experts: bool = False) -> list[int]:
        held = locations.physical_to_logical_map_cpu
        if require_global_experts or layer_id >= len(held):
            return list(nearest(layer_id, logical_expert_id, require_global_experts))
        return [place for place, expert in enumerate(held[layer_id].tolist()) if expert == logical_expert_id]

    locations.logical_to_all_physical = every
    try:
        yield
    finally:
        del locations.logical_to_all_physical
