# SPDX-License-Identifier: Apache-2.0
"""LoRA as PEFT defines it: its names, the model that carries it, which weights are adapted, and what is refused."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch.distributed.fsdp import FSDPModule

from verl_sync_plugin.layout.tensors import clean_name
from verl_sync_plugin.lora.settings import lora_config, refuse_config

ADAPTER = "default"  # verl's name for its adapter
REMEDY = "Merge the adapter yourself, or set actor_rollout_ref.rollout.custom.sync.enabled=False to run stock verl"


def is_adapter(name: str) -> bool:
    """True if a state-dict key belongs to an adapter."""
    return ".lora_" in name


def adapter_of(name: str) -> str:
    """The adapter to which a factor's state-dict key belongs."""
    return name.partition(".lora_")[2].split(".")[1]


def plain_name(name: str) -> str:
    """The name of a module or a state-dict key in the model that PEFT has wrapped."""
    return name.removeprefix("base_model.model.")


def merged_name(name: str, in_use: Mapping[str, str | None]) -> str | None:
    """The HF name of a PEFT state-dict key; ``None`` for what does not travel; adapters keep their key. ``in_use``: see
    ``Adapters.copies``; of a module that is not there each copy travels."""
    if is_adapter(name):
        return name
    parts = plain_name(name).split(".")
    for mark, length in (("modules_to_save", 2), ("original_module", 1)):
        if mark in parts:
            where = parts.index(mark)
            owner = parts[where + 1] if length == 2 else None
            if in_use.get(".".join(parts[:where]), owner or "an adapter") != owner:
                return None
            del parts[where : where + length]
            break
    return ".".join(part for part in parts if part != "base_layer")


def build_peft_model(module: torch.nn.Module, model: Any) -> torch.nn.Module:
    """Adds the adapter as verl's FSDP engine does, with all of ``lora.peft``, in the dtype of the base: FSDP1 flattens
    parameters of one dtype only."""
    from peft import get_peft_model

    module.enable_input_require_grads()  # type: ignore[operator]
    dtype = next(parameter.dtype for parameter in module.parameters())
    adapted: torch.nn.Module = get_peft_model(module, lora_config(model))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted


def of_peft(module: torch.nn.Module) -> type | None:
    """The class of PEFT that a module is an instance of; FSDP2 makes subclasses of it."""
    return next((each for each in type(module).__mro__ if each.__module__.partition(".")[0] == "peft"), None)


def carries_adapter(model: torch.nn.Module) -> bool:
    """True if PEFT has put anything into a model."""
    if "peft" not in sys.modules:
        return False
    return hasattr(model, "peft_config") or any(of_peft(module) for module in model.modules())


def refuse_others(model: torch.nn.Module) -> None:
    """Raises ValueError, with name and type, for adapters and PEFT layers that would not reach the engine."""
    from peft import PeftMixedModel, PeftModel
    from peft.tuners.lora import LoraLayer, LoraModel
    from peft.utils import ModulesToSaveWrapper

    for name, config in (getattr(model, "peft_config", None) or {}).items():
        refuse_config(f"adapter {name!r}", vars(config), REMEDY)
    served = (PeftModel, PeftMixedModel, LoraModel, LoraLayer, ModulesToSaveWrapper)
    for name, module in model.named_modules():
        kind = of_peft(module)
        if kind is not None and not isinstance(module, served) and not is_adapter(f".{name}"):
            raise ValueError(
                f"module {clean_name(name)!r} is a {kind.__name__} of PEFT ({kind.__module__}), and weight sync "
                f"delivers LoRA only. {REMEDY}."
            )


Kind = Literal["linear", "embedding", "conv", "experts", "bias"]  # PEFT's ways to make a delta of factors


@dataclass(frozen=True)
class Weight(ABC):
    """An adapted weight of any trainer: its ``name`` in messages, keys of its factors ``a`` and ``b``, and of DoRA's
    ``magnitude`` vector, if any. It consists of ``matrices`` one after another; one that is ``transposed`` is stored
    (in, out), and DoRA then scales columns instead of rows."""

    name: str
    a: str
    b: str
    magnitude: str | None = field(default=None, kw_only=True)
    matrices: ClassVar[int] = 1
    transposed: ClassVar[bool] = False

    @property
    @abstractmethod
    def scaling(self) -> float:
        """The factor of the delta, as the trainer has it now."""

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Keys of everything the merge needs."""
        return tuple(key for key in (self.a, self.b, self.magnitude) if key)

    def columns(self, shape: tuple[int, ...]) -> int:
        """Elements per row of the matrices."""
        return shape[-1]

    def product(self, factors: Mapping[str, torch.Tensor], number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two matrices whose product, times ``scaling``, is added to matrix ``number``; of whole factors, by key."""
        return factors[self.b], factors[self.a]


@dataclass(frozen=True)
class LoRAWeight(Weight):
    """One adapted weight or bias, by its HF name: PEFT's layer, the active adapter, and how the factors make the delta.
    Keys are those of the state dict; of a bias there is ``b`` alone, the bias of the B factor."""

    layer: Any
    adapter: str
    kind: Kind

    @property
    def scaling(self) -> float:
        return float(self.layer.scaling[self.adapter])

    @cached_property
    def matrices(self) -> int:  # type: ignore[override]
        return int(self.layer.num_experts) if self.kind == "experts" else 1

    @cached_property
    def transposed(self) -> bool:  # type: ignore[override]
        if self.kind == "experts":
            return not self.layer._did_swap_in_out_features
        return self.kind == "embedding" or (self.kind == "linear" and bool(self.layer.fan_in_fan_out))

    def columns(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape[1:]) if self.kind in ("conv", "bias") else shape[-1]

    def product(self, factors: Mapping[str, torch.Tensor], number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes factors A ``(r, in)`` and B ``(out, r)``; of an embedding ``(r, num_embeddings)`` and ``(embedding_dim,
        r)``; of fused experts ``(E * r, in)`` and ``(out, r * E)``; of a convolution ``(r, in, *kernel)`` and ``(out,
        r, 1, ...)``; of a bias only B, ``(out,)``.

        Source: ``get_delta_weight`` in ``peft.tuners.lora.layer``, and the handling of ``lora_bias`` in
        ``Linear.merge``.
        """
        b = factors[self.b]
        if self.kind == "bias":
            return b.unsqueeze(1), b.new_ones((1, 1))
        a = factors[self.a]
        if self.kind == "experts":  # PEFT keeps A expert by expert, but B rank by rank
            a = a.unflatten(0, (self.matrices, -1))[number]
            b = b.unflatten(1, (-1, self.matrices))[..., number]
        elif self.kind == "conv":
            a, b = a.flatten(1), b.flatten(1)
        return (a.T, b.T) if self.transposed else (b, a)


class Adapters:
    """The adapters of a PEFT model that compute when this is made; a later sync that finds others would send weights
    that nobody trains. Raises ValueError, with the module's name, for an adapter that cannot be merged, and where
    several are active.

    Attributes:
        weights: all adapted weights, by the names of the state dict.
        copies: of each module that PEFT copied to train it whole (``modules_to_save``), the adapter whose copy
            computes; ``None`` where it is the module itself.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        from peft.tuners.lora import LoraLayer
        from peft.utils import ModulesToSaveWrapper

        refuse_others(model)
        self.weights: list[LoRAWeight] = []
        self.copies: dict[str, str | None] = {}
        self._modules: list[tuple[str, Any, tuple[tuple[str, ...], bool, bool]]] = []
        for wrapped, module in model.named_modules():
            if isinstance(module, LoraLayer | ModulesToSaveWrapper):
                name = clean_name(wrapped)
                self._modules.append((name, module, _state(module)))
                if isinstance(module, LoraLayer):
                    self.weights += _of_layer(name, module)
                else:
                    self.copies[plain_name(name)] = _copy_in_use(name, module)

    def rename(self, rename: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Gives the weights the names that ``rename`` gives to state-dict keys."""
        named = rename({each.name: each for each in self.weights})
        self.weights = [replace(weight, name=name) for name, weight in named.items()]

    def check(self) -> None:
        """Raises ValueError, with the name of a module, when other adapters are in use by now."""
        for name, module, (active, off, merged) in self._modules:
            if (now := _state(module)) != (active, off, merged):
                raise ValueError(
                    f"module {name!r}: in the first sync the active adapters were {active} (switched off: {off}, "
                    f"merged: {merged}), now they are {now[0]} ({now[1]}, {now[2]}), and the engine has the former. Go "
                    "back to these."
                )


def _state(module: Any) -> tuple[tuple[str, ...], bool, bool]:
    """The adapters that are active, and whether they are switched off or merged."""
    return tuple(module.active_adapters), bool(module.disable_adapters), bool(module.merged_adapters)


def _copy_in_use(name: str, module: Any) -> str | None:
    active = [] if module.disable_adapters else module.active_adapters
    if len(active) > 1:
        raise ValueError(
            f"module {name!r}, one of modules_to_save, has several active adapters {active}. Activate one of them "
            "(set_adapter)."
        )
    return next((each for each in active if each in module.modules_to_save), None)


def refuse_incomplete(weights: Mapping[str, LoRAWeight], exported: Container[str], factors: Sequence[str]) -> None:
    """Raises ValueError, with names, unless all that travels (``exported`` names the weights in it) is merged with all
    that belongs to its adapters; ``factors`` are the keys of all adapter parameters, of adapters not in use too."""
    merged = {key for weight in weights.values() for key in weight.keys}
    if lost := [name for name in weights if name not in exported] + list(merged.difference(factors)):
        raise ValueError(f"LoRA parameters without a counterpart in the trainer's state: {', '.join(sorted(lost)[:5])}")
    adapters = {weight.adapter for weight in weights.values()}
    if left := [key for key in factors if key not in merged and adapter_of(key) in adapters]:
        raise ValueError(f"weight sync does not know the use of LoRA parameters: {', '.join(left[:5])}. {REMEDY}.")


def _of_layer(name: str, layer: Any) -> Iterator[LoRAWeight]:
    for adapter in layer.active_adapters:
        if adapter not in layer.scaling:
            continue
        kind = _kind(name, layer)
        _refuse(name, layer, adapter, kind)
        factor = f"{name}.lora_{{}}.{adapter}.weight"
        if kind == "embedding":
            factor = f"{name}.lora_embedding_{{}}.{adapter}"
        a, b = factor.format("A"), factor.format("B")
        dora = layer.use_dora.get(adapter, False)
        magnitude = f"{name}.lora_magnitude_vector.{adapter}.weight" if dora else None
        parameter = getattr(layer, "parameter_name", None) or "weight"
        yield LoRAWeight(f"{name}.base_layer.{parameter}", a, b, layer, adapter, kind, magnitude=magnitude)
        if layer.lora_bias.get(adapter, False):
            bias = f"{name}.lora_B.{adapter}.bias"
            yield LoRAWeight(f"{name}.base_layer.bias", "", bias, layer, adapter, "bias")


def _kind(name: str, layer: Any) -> Kind:
    from peft.tuners.lora.layer import Conv1d, Conv2d, Conv3d, Embedding, Linear, ParamWrapper

    # FSDP2 puts a class of its own before a layer's
    found: Any = next(each for each in type(layer).__mro__ if not issubclass(each, FSDPModule))
    if found is ParamWrapper:
        return "experts" if layer.num_experts > 1 else "linear"
    kinds: dict[Any, Kind] = {Linear: "linear", Embedding: "embedding", Conv1d: "conv", Conv2d: "conv", Conv3d: "conv"}
    if (kind := kinds.get(found)) is None:
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
    elif kind == "conv" and base.groups > 1:
        problem = f"is a convolution of {base.groups} groups, which weight sync cannot merge"
    elif layer.lora_bias.get(adapter, False) and getattr(base, "bias", None) is None:
        problem = "has a bias in its B factor but none in its base layer to merge it into"
    if problem:
        raise ValueError(f"LoRA module {name!r} {problem}. {REMEDY}.")
