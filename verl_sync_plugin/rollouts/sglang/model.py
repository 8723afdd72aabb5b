# SPDX-License-Identifier: Apache-2.0
"""SGLang's model of one scheduler rank as the receiver's ``EngineModel``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.engine.model import EngineModel
from verl_sync_plugin.rollouts.sglang.refusals import ARGUMENTS

# A tied model's one weight as checkpoints have it, and its second name, which most checkpoints leave out
EMBEDDING = re.compile(r"(?:[a-z_]+\.)*embed_tokens\.weight")
HEAD = "lm_head.weight"
# CUDA graphs read these where they first lay. A norm's weight of Gemma and Qwen3-Next plus one, which in SGLang 0.5.12
# every load puts elsewhere; and what a router makes in its first forward: GLM of its weight (0.5.12 to 0.5.14,
# sgl-project/sglang#35883), Gemma 4 of its scale, later releases by ``fuse_scale``. Without them a sync leaves the
# routing as it was
NORM_COPY = "gemma_weight"
ROUTER_COPIES: dict[str, Callable[[Any], torch.Tensor]] = {
    "_weight_fp32": lambda router: router.weight,
    "_fused_scale": lambda router: router.scale * router.root_size,
}

# Why a tensor of the trainer is rightly used by no engine rank; of any other that is an error. A tied head needs no
# entry, for its bytes travel as the embedding's too
FURTHER_TOKENS = "a layer after the last one predicts further tokens, and the engine's main model has none"
BLIND = "the engine was launched without its vision tower (see SGLang's enable_multimodal)"
# (regular expression on the whole HF name, why no byte of it is needed)
SKIPS = (
    (r".*\.rotary_emb\.inv_freq", "the engine computes rotary frequencies from its configuration"),
    (r"(?:model\.)?mtp(?:_layers)?\..*", FURTHER_TOKENS),
)
# What only a layer has that predicts further tokens: it joins the last hidden state and the next token's embedding
JOINS = "eh_proj.weight"

_LAYER = re.compile(r"((?:language_model\.)?model\.(?:language_model\.)?layers\.\d+\.).*")
_VISION = re.compile(r"(?:model\.)?(?:vision_model|multi_modal_projector)\..*")


class SGLangModel(EngineModel):
    """Any model class of SGLang. Some write into the tensors that they are given (Gemma adds one to its norms)."""

    engine = "SGLang"
    # DeepSeek's loaders fuse these pairs inside one load_weights call; a pair torn over two calls leaves the fused
    # weight stale without a word (the first of a pair waits for the second)
    fused_pairs = tuple((f"q_a_proj.{kind}", f"kv_a_proj_with_mqa.{kind}") for kind in ("weight", "weight_scale_inv"))
    plain_layout = (
        f"If these are experts, set +{ARGUMENTS}.moe_runner_backend=triton, and do not set "
        f"SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED; else {TURN_OFF}, which raises no error."
    )

    def __init__(self, module: Any, tp_rank: int) -> None:
        super().__init__(module, tp_rank)
        self._model = module  # for its methods, of which torch.nn.Module knows nothing
        self._copies_tied = copies_tied(module)
        _name_wrapped(module)
        self._routers = [(each, name) for each in module.modules() for name in ROUTER_COPIES if hasattr(each, name)]
        self._folding = [each for each in module.modules() if hasattr(each, "_scale_fused")]
        # PaddleOCR-VL's, by the size of an image
        self._caching = [each for each in module.modules() if hasattr(each, "cache_position_embedding")]
        self._norms = [(each, each._buffers[NORM_COPY]) for each in module.modules() if NORM_COPY in each._buffers]

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with _every_replica():
            self._model.load_weights(self._under_both_names(tensors) if self._copies_tied else tensors)

    def _under_both_names(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name, tensor
            if EMBEDDING.fullmatch(name) and not any(other.endswith(HEAD) for other in self.sent):
                yield HEAD, tensor

    def after_load(self) -> None:
        for _, module in self.module.named_modules():
            method: Any = getattr(module, "quant_method", None)
            if method is not None and not hasattr(module, "base_layer"):  # a layer's adapter has the method, too
                method.process_weights_after_loading(module)

    @property
    def fp8_block(self) -> tuple[int, int]:
        modules = list(self.module.modules())
        if any(getattr(each, "format_ue8m0", False) for module in modules for each in module._parameters.values()):
            raise ValueError(
                "SGLang computes with its fp8 weights by DeepGEMM here and has rounded their scales to powers of two, "
                f"which no sync does. Set SGLANG_ENABLE_JIT_DEEPGEMM=0 in the environment of every node, or {TURN_OFF}."
            )
        configs = (getattr(getattr(module, "quant_method", None), "quant_config", None) for module in modules)
        blocks = {tuple(block) for config in configs if (block := getattr(config, "weight_block_size", None))}
        return blocks.pop() if len(blocks) == 1 else super().fp8_block

    @property
    def constants(self) -> dict[str, float]:
        return dict.fromkeys(cache_scales(self.module), 1.0)

    @property
    def can_derive(self) -> bool:
        return hasattr(self._model, "post_load_weights")

    def derive_after_load(self) -> None:
        self._model.post_load_weights()

    @property
    def refreshed(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(module.weight, copy) for module, copy in self._norms]

    @torch.no_grad()
    def refresh_copies(self) -> None:
        for module, name in self._routers:
            if (copy := getattr(module, name)) is not None:  # not before the first forward
                copy.copy_(ROUTER_COPIES[name](module))
        for module in self._folding:
            if module._scale_fused:
                module.fuse_scale()
        for module in self._caching:
            module.cache_position_embedding.clear()
            module.cache_position_count.clear()
        for module, first in self._norms:
            module._buffers[NORM_COPY] = torch.add(module.weight, 1.0, out=first)

    def layout_token(self) -> tuple[object, ...]:
        """The places of all experts: SGLang's load balancing moves experts between the places of a parameter that stays
        where it is."""
        metadata = _expert_locations()
        return () if metadata is None else tuple(metadata.physical_to_logical_map_cpu.flatten().tolist())

    def why_skipped(self, name: str) -> str:
        # All names tell the trainer's own layers from those that predict further tokens, which no number of layers
        # does: the engine's may be smaller than the trainer's
        layer = _LAYER.fullmatch(name)
        if layer is not None and layer[1] + JOINS in self.sent:
            return FURTHER_TOKENS
        # Llama 4 says itself whether it has a vision tower; SGLang turns that off by default, and leaves None there
        if not getattr(self._model, "has_vision", True) and _VISION.fullmatch(name):
            return BLIND
        return next((reason for pattern, reason in SKIPS if re.fullmatch(pattern, name)), "")


def _name_wrapped(module: torch.nn.Module) -> None:
    """Names the parameters of a layer that an adapter wraps as the layer itself does. SGLang does so for its weight and
    bias alone, and its loads skip the others (experts) without a word."""
    for wrapper in module.modules():
        layer = getattr(wrapper, "base_layer", None)
        if isinstance(layer, torch.nn.Module):
            for name, parameter in layer.named_parameters(recurse=False):
                if not hasattr(wrapper, name):
                    wrapper.register_parameter(name, parameter)


def copies_tied(module: torch.nn.Module) -> bool:
    """True if embedding and head are tied by the configuration, and two parameters in SGLang's class all the same,
    whose own load then leaves the head as it was allocated: a tied checkpoint has none."""
    config = getattr(module, "config", None)
    tied = getattr(getattr(config, "text_config", None) or config, "tie_word_embeddings", False)
    head = getattr(getattr(module, "lm_head", None), "weight", None)
    others = (each for name, each in module.named_parameters(remove_duplicate=False) if not name.startswith("lm_head."))
    return bool(tied) and head is not None and all(each is not head for each in others)


def _expert_locations() -> Any:
    """SGLang's own; ``None`` where experts are not moved."""
    module = sys.modules.get("sglang.srt.eplb.expert_location")
    return None if module is None else module.get_global_expert_location_metadata()


@contextmanager
def _every_replica() -> Iterator[None]:
    """Context in which a load writes every replica of an expert. SGLang's loaders get the one that requests are sent
    to; another on the same GPU would keep its old weights."""
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


def cache_scales(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Scales of a KV cache, by name: SGLang makes them parameters of every attention of a model in fp8."""
    return {
        f"{path}.{key}": parameter
        for path, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if key in ("k_scale", "v_scale") and parameter is not None and hasattr(module, f"{key}_float")
    }


@torch.no_grad()
def write_constants(model: torch.nn.Module) -> None:
    for scale in cache_scales(model).values():
        scale.fill_(1.0)
