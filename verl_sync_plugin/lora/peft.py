# SPDX-License-Identifier: Apache-2.0
"""LoRA as PEFT defines it: its names, the model that carries it, which weights are adapted, and what is refused."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from verl_sync_plugin.layout.tensors import clean_name
from verl_sync_plugin.lora.settings import LEAVE_OUT, REMEDY, refuse_config

ADAPTER = "default"  # verl's name for its adapter


def is_adapter(name: str) -> bool:
    """True if a state-dict key belongs to an adapter."""
    return ".lora_" in name


def adapter_of(name: str) -> str:
    """The adapter to which a factor's state-dict key belongs."""
    return name.partition(".lora_")[2].split(".")[1]


def merged_name(name: str) -> str:
    """The HF name of a PEFT state-dict key; adapters keep their key."""
    parts = name.removeprefix("base_model.model.").split(".")
    return name if is_adapter(name) else ".".join(part for part in parts if part != "base_layer")


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

    for name, config in (getattr(model, "peft_config", None) or {}).items():
        refuse_config(f"adapter {name!r}", vars(config))
    served = (PeftModel, PeftMixedModel, LoraModel, LoraLayer)
    for name, module in model.named_modules():
        kind = of_peft(module)
        if kind is not None and not isinstance(module, served) and not is_adapter(f".{name}"):
            raise ValueError(
                f"module {clean_name(name)!r} is a {kind.__name__} of PEFT ({kind.__module__}), and weight sync "
                f"delivers LoRA only. {REMEDY}."
            )
    if not hasattr(model, "get_base_model"):
        raise ValueError(f"PEFT's adapters were put into a {type(model).__name__} itself. Use peft.get_peft_model.")


@dataclass(frozen=True)
class Weight(ABC):
    """An adapted weight of any trainer: its ``name`` in messages, and the keys of its factors ``a`` and ``b``. It
    consists of ``matrices`` one after another."""

    name: str
    a: str
    b: str
    matrices: int = field(default=1, kw_only=True)

    @property
    @abstractmethod
    def scaling(self) -> float:
        """The factor of the delta, as the trainer has it now."""

    @cached_property
    def keys(self) -> tuple[str, str]:
        """Keys of everything the merge needs."""
        return self.a, self.b

    def product(self, factors: Mapping[str, torch.Tensor], number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two matrices whose product, times ``scaling``, is added to matrix ``number``; of whole factors, by key."""
        return factors[self.b], factors[self.a]


@dataclass(frozen=True)
class LoRAWeight(Weight):
    """One adapted weight, by its HF name: PEFT's layer, the active adapter, and whether the weight is stored (in, out).
    Keys are those of the state dict."""

    layer: Any
    adapter: str
    transposed: bool

    @property
    def scaling(self) -> float:
        return float(self.layer.scaling[self.adapter])

    def product(self, factors: Mapping[str, torch.Tensor], number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes factors A ``(r, in)`` and B ``(out, r)``; of an embedding ``(r, num_embeddings)`` and ``(embedding_dim,
        r)``; of fused experts ``(E * r, in)`` and ``(out, r * E)``.

        Source: ``get_delta_weight`` in ``peft.tuners.lora.layer``.
        """
        a, b = factors[self.a], factors[self.b]
        if self.matrices > 1:  # PEFT keeps A expert by expert, but B rank by rank
            a = a.unflatten(0, (self.matrices, -1))[number]
            b = b.unflatten(1, (-1, self.matrices))[..., number]
        return (a.T, b.T) if self.transposed else (b, a)


class Adapters:
    """Records the active adapters of a PEFT model; ``check`` refuses a later sync that finds others. Raises ValueError,
    with the module's name, for an adapter that cannot be merged, and where several are active. ``weights`` are all
    adapted weights by the names that ``rename`` gives to state-dict keys."""

    def __init__(self, model: torch.nn.Module, rename: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> None:
        from peft.tuners.lora import LoraLayer

        refuse_others(model)
        found: dict[str, LoRAWeight] = {}
        self._modules: list[tuple[str, Any, tuple[tuple[str, ...], bool, bool, list[Any]]]] = []
        for wrapped, module in model.named_modules():
            if isinstance(module, LoraLayer):
                self._modules.append((clean_name(wrapped), module, _state(module)))
                found |= {weight.name: weight for weight in _of_layer(clean_name(wrapped), module)}
        self.weights = {name: replace(weight, name=name) for name, weight in rename(found).items()}

    def check(self) -> None:
        """Raises ValueError, with the name of a module, when other adapters are in use by now."""
        for name, module, before in self._modules:
            if (now := _state(module)) != before:
                again = ", added again" if now[:3] == before[:3] else ""
                raise ValueError(
                    f"module {name!r}: the adapters (active, off, merged) were {before[:3]} in the first sync, "
                    f"now they are {now[:3]}{again}, and the engine has the former. Switch back to the former."
                )


def _state(module: Any) -> tuple[tuple[str, ...], bool, bool, list[Any]]:
    """The adapters that are active, whether they are switched off or merged, and the modules of their factors."""
    active, factors = tuple(module.active_adapters), module.lora_A
    held = [factors[name] for name in active if name in factors]
    return active, bool(module.disable_adapters), bool(module.merged_adapters), held


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
    from peft.tuners.lora.layer import Embedding, Linear, ParamWrapper

    for adapter in layer.active_adapters:
        if adapter not in layer.scaling:
            continue
        # FSDP2 puts a class of its own before a layer's
        kind: Any = next(each for each in type(layer).__mro__ if not issubclass(each, FSDPModule))
        if kind not in (Linear, Embedding, ParamWrapper):
            raise ValueError(f"LoRA module {name!r} is a {kind.__name__}: weight sync cannot merge it. {LEAVE_OUT}.")
        _refuse(name, layer, adapter)
        factor = f"{name}.lora_embedding_{{}}.{adapter}" if kind is Embedding else f"{name}.lora_{{}}.{adapter}.weight"
        a, b = factor.format("A"), factor.format("B")
        parameter, experts = "weight", 1
        if kind is ParamWrapper:
            parameter, experts = layer.parameter_name, layer.num_experts
        transposed = kind is Embedding or bool(layer.fan_in_fan_out)
        if experts > 1:
            transposed = not layer._did_swap_in_out_features
        yield LoRAWeight(f"{name}.base_layer.{parameter}", a, b, layer, adapter, transposed, matrices=experts)


def _refuse(name: str, layer: Any, adapter: str) -> None:
    active, variant = layer.active_adapters, getattr(layer, "lora_variant", {}).get(adapter)
    for applies, problem in (
        (layer.disable_adapters, "is switched off. Switch it on"),
        (layer.merged, "is merged into its base weight already. Unmerge it"),
        (len(active) > 1, f"has several active adapters {active}. Activate one, by set_adapter()"),
        (variant is not None, f"uses the variant {type(variant).__name__}, which weight sync cannot merge. {REMEDY}"),
    ):
        if applies:
            raise ValueError(f"LoRA module {name!r} {problem}.")
