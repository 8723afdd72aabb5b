# SPDX-License-Identifier: Apache-2.0
"""Which weights of a PEFT model are adapted, and which adapters cannot be merged."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from verl_sync_plugin.layout.names import clean_name
from verl_sync_plugin.lora.adapters import REMEDY, refuse_others
from verl_sync_plugin.lora.names import adapter_of


class Kind(Enum):
    """How the factors make a delta."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    CONV = "conv"
    EXPERTS = "experts"
    BIAS = "bias"


@dataclass(frozen=True)
class LoRAWeight:
    """One adapted weight or bias.

    Attributes:
        name: HF name of the weight.
        layer: PEFT's layer.
        adapter: name of its active adapter.
        kind: how the factors make its delta.
        a: state-dict key of the A factor; empty for a bias.
        b: state-dict key of the B factor; of a bias the bias of the B factor.
        magnitude: state-dict key of DoRA's magnitude vector, if any.
    """

    name: str
    layer: Any
    adapter: str
    kind: Kind
    a: str
    b: str
    magnitude: str | None = None

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """State-dict keys of everything the merge needs."""
        return tuple(key for key in (self.a, self.b, self.magnitude) if key)

    @property
    def scaling(self) -> float:
        """What the product of the factors is multiplied with."""
        return float(self.layer.scaling[self.adapter])

    @cached_property
    def transposed(self) -> bool:
        """The weight is stored (in, out): embeddings and Conv1D. DoRA then scales columns instead of rows."""
        return self.kind is Kind.EMBEDDING or (self.kind is Kind.LINEAR and bool(self.layer.fan_in_fan_out))

    @cached_property
    def plain(self) -> bool:
        """The delta is ``scaling * B @ A`` and nothing else: PEFT's own ``Linear``, no subclass, without a variant."""
        from peft.tuners.lora import Linear

        layer = self.layer
        ordinary = _class_of(layer) is Linear and layer.lora_variant.get(self.adapter) is None
        return ordinary and self.kind is Kind.LINEAR and self.magnitude is None and not self.transposed

    def columns(self, shape: tuple[int, ...]) -> int:
        """Elements of the weight per row; a row is what ``delta_rows`` counts in."""
        if self.kind in (Kind.LINEAR, Kind.EMBEDDING):
            return shape[-1]
        return math.prod(shape[1:])


def renamed_weights(found: list[LoRAWeight], rename: Callable[[dict[str, Any]], dict[str, Any]]) -> list[LoRAWeight]:
    """The weights under the names that ``rename`` gives to state-dict keys."""
    return [replace(weight, name=name) for name, weight in rename({each.name: each for each in found}).items()]


def lora_weights(model: torch.nn.Module) -> list[LoRAWeight]:
    """All adapted weights of a PEFT model; names as PEFT's state dict has them, ``base_layer`` included.

    Raises:
        ValueError: an adapter that cannot be merged, LoRA or not; the text names the module.
    """
    from peft.tuners.lora import LoraLayer

    refuse_others(model)
    found: list[LoRAWeight] = []
    for wrapped, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            found.extend(_of_layer(clean_name(wrapped), layer))
    return found


def refuse_incomplete(weights: Mapping[str, LoRAWeight], exported: Container[str], factors: Sequence[str]) -> None:
    """Raises ValueError, with names, unless all that travels is merged with all that belongs to its adapters.

    Args:
        weights: all adapted weights by name.
        exported: names of those that are part of what travels; another one's delta would never arrive.
        factors: state-dict keys of all adapter parameters of the trainer, of adapters that are not in use too.
    """
    merged = {key for weight in weights.values() for key in weight.keys}
    lost = [name for name in weights if name not in exported] + list(merged.difference(factors))
    if lost:
        raise ValueError(f"LoRA parameters without a counterpart in the trainer's state: {', '.join(sorted(lost)[:5])}")
    adapters = {weight.adapter for weight in weights.values()}
    left = [key for key in factors if key not in merged and adapter_of(key) in adapters]
    if left:
        raise ValueError(f"weight sync does not know the use of LoRA parameters: {', '.join(left[:5])}. {REMEDY}.")


def _of_layer(name: str, layer: Any) -> Iterator[LoRAWeight]:
    for adapter in layer.active_adapters:
        if adapter not in layer.scaling:
            continue
        kind = _kind(name, layer)
        _refuse(name, layer, adapter, kind)
        factor = f"{name}.lora_{{}}.{adapter}.weight"
        if kind is Kind.EMBEDDING:
            factor = f"{name}.lora_embedding_{{}}.{adapter}"
        a, b = factor.format("A"), factor.format("B")
        dora = layer.use_dora.get(adapter, False)
        magnitude = f"{name}.lora_magnitude_vector.{adapter}.weight" if dora else None
        parameter = getattr(layer, "parameter_name", None) or "weight"
        yield LoRAWeight(f"{name}.base_layer.{parameter}", layer, adapter, kind, a, b, magnitude)
        if layer.lora_bias.get(adapter, False):
            bias = f"{name}.lora_B.{adapter}.bias"
            yield LoRAWeight(f"{name}.base_layer.bias", layer, adapter, Kind.BIAS, "", bias)


def _class_of(layer: Any) -> Any:
    """The class of a layer; FSDP2 puts one of its own before that."""
    return next(each for each in type(layer).__mro__ if not issubclass(each, FSDPModule))


def _kind(name: str, layer: Any) -> Kind:
    from peft.tuners.lora.layer import Conv1d, Conv2d, Conv3d, Embedding, Linear, ParamWrapper

    found = _class_of(layer)
    if found is ParamWrapper:
        return Kind.EXPERTS if layer.num_experts > 1 else Kind.LINEAR
    kinds = {Linear: Kind.LINEAR, Embedding: Kind.EMBEDDING, Conv1d: Kind.CONV, Conv2d: Kind.CONV, Conv3d: Kind.CONV}
    kind = kinds.get(found)
    if kind is None:
        raise ValueError(f"LoRA module {name!r} is a {found.__name__}: weight sync cannot merge it. {REMEDY}.")
    return kind


def _refuse(name: str, layer: Any, adapter: str, kind: Kind) -> None:
    problem = ""
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    base = layer.get_base_layer()
    if layer.disable_adapters:
        problem = "is switched off"
    elif layer.merged:
        problem = "is merged into its base weight already"
    elif len(layer.active_adapters) > 1:
        problem = f"has several active adapters {layer.active_adapters}"
    elif variant is not None and not layer.use_dora.get(adapter, False):
        problem = f"uses the variant {type(variant).__name__}, which weight sync cannot merge"
    elif kind is Kind.CONV and base.groups > 1:
        problem = f"is a convolution of {base.groups} groups, which weight sync cannot merge"
    elif layer.lora_bias.get(adapter, False) and getattr(base, "bias", None) is None:
        problem = "has a bias in its B factor but none in its base layer to merge it into"
    if problem:
        raise ValueError(f"LoRA module {name!r} {problem}. {REMEDY}.")
