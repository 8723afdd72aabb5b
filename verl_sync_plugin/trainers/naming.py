# SPDX-License-Identifier: Apache-2.0
"""From the trainer's state-dict names to the names of the model's checkpoint, as views.

An engine's loader knows the tensors of a checkpoint. The trainer's model may hold them under other names and fused:
transformers 5 keeps Mixtral's experts ``block_sparse_moe.experts.N.w1`` and ``w3`` as one ``mlp.experts.gate_up_proj``,
and puts ``model.language_model.`` before the layers of many multimodal models. It undoes that when it saves a model;
verl's stream unfuses experts, but always into the names of Qwen's. Both functions run here once, on meta tensors, which
keep storage, offset and strides: so what they do to the real tensor can be read off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from verl_sync_plugin.layout.tensors import Base, ParameterName, View
from verl_sync_plugin.lora.peft import is_adapter
from verl_sync_plugin.trainers.base import WirePolicy, dtype_name

Rewrite = Callable[[Iterable[tuple[str, torch.Tensor]]], Iterator[tuple[str, torch.Tensor]]]
Rename = Callable[[dict[str, Any]], dict[str, Any]]


def unsaved_of(model: Any) -> frozenset[str]:
    """The names that a model of transformers ties to others; see ``Naming``."""
    return frozenset(getattr(model, "all_tied_weights_keys", None) or ())


def tied_head(config: Mapping[str, Any]) -> frozenset[str]:
    """The head's name where a model's config ties it to the embedding, and a checkpoint has it once."""
    key = "tie_word_embeddings"
    return frozenset(("lm_head.weight",) if config.get(key, (config.get("text_config") or {}).get(key)) else ())


@dataclass(frozen=True)
class Naming:
    """Decides how each tensor of a trainer travels: its dtype, its names in a checkpoint, its number of parts.
    ``rewrite`` and ``rename``, of a state dict's names, are verl's. ``unsaved`` are names that the model ties to
    others: transformers leaves them out of a checkpoint, and some of SGLang's classes (Gemma 3) do not know them."""

    policy: WirePolicy
    rewrite: Rewrite
    rename: Rename = dict
    unsaved: frozenset[str] = frozenset()

    def parameters_of(self, module: torch.nn.Module) -> frozenset[str]:
        """The names of all parameters of a module; all other names in its state dict are buffers."""
        return frozenset(self.rename(dict(module.named_parameters(remove_duplicate=False))))

    def base_of(
        self,
        key: str,
        held: Sequence[ParameterName],
        dtype: torch.dtype,
        lengths: tuple[int, ...],
        parameter: bool = True,
    ) -> Base:
        """The base of one tensor, which is ``held`` under each of its names. A ``parameter`` travels in the wire dtype,
        else it travels as it is."""
        saved = [each for each in held if each.name not in self.unsaved] or held
        views = [view for each in saved for view in hf_views(each, dtype, self.rewrite)]
        names = [each.name for each in held] + [view.name for view in views]
        wire = self.policy.of_parameter(names, dtype) if parameter else dtype
        return Base(key, dtype_name(wire), wire.itemsize, lengths, tuple(views))


class _Uncopied(TorchFunctionMode):
    """Context in which ``contiguous`` returns a meta tensor as it is: transformers >= 5.14 calls it on every part of a
    fused tensor, and only the copy that is packed for the engine has to be contiguous."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def hf_views(held: ParameterName, dtype: torch.dtype, rewrite: Rewrite) -> list[View]:
    """The HF tensors that ``rewrite`` makes of one trainer tensor. Raises ValueError where it computes new data instead
    of viewing the old."""
    whole = torch.empty(held.shape, dtype=dtype, device="meta")
    if held.strides is not None:
        whole = torch.empty_strided(held.shape, held.strides, dtype=dtype, device="meta")
    views = []
    with _Uncopied():
        rewritten = list(rewrite([(held.name, whole)]))
    for hf_name, tensor in rewritten:
        if tensor.untyped_storage()._cdata != whole.untyped_storage()._cdata or tensor.dtype != whole.dtype:
            raise ValueError(
                f"parameter {held.name!r} becomes {hf_name!r} by a computation, not by slicing; weight sync does not "
                "support this model. Set actor_rollout_ref.rollout.custom.sync.enabled=False to run stock verl."
            )
        if tensor.numel():
            span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            strides = None if tensor.is_contiguous() else tuple(tensor.stride())
            views.append(View(hf_name, tuple(tensor.shape), int(tensor.storage_offset()), span, strides))
    return views


def verl_rewrite(model_type: str | None) -> Rewrite:
    """verl's own rewriting of FSDP weight streams for a HF ``model_type``."""
    from verl.workers.engine.fsdp.transformer_impl import unfuse_moe_params

    return lambda pairs: unfuse_moe_params(pairs, model_type)


def checkpoint_rewrite(model: Any) -> Rewrite:
    """The names and shapes that transformers would save a model under, and then verl's own rewriting. A model that
    ``from_pretrained`` did not make keeps its own names."""
    streamed = verl_rewrite(model.config.model_type)
    # Qwen3-VL-MoE's transposes a checkpoint's tensor unless it is shaped as the model's, which its own always are
    conversions = [
        each
        for each in getattr(model, "_weight_conversions", None) or ()
        if not any(getattr(operation, "check_dims", False) for operation in getattr(each, "operations", ()))
    ]
    if not conversions:
        return streamed
    from transformers.core_model_loading import revert_weight_conversion

    loaded: Any = SimpleNamespace(config=model.config, _weight_conversions=conversions)

    def saved(pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs:
            if is_adapter(name):
                yield name, tensor
            else:
                yield from revert_weight_conversion(loaded, {name: tensor}).items()

    return lambda pairs: streamed(saved(pairs))
