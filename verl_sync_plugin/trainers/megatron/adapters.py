# SPDX-License-Identifier: Apache-2.0
"""Which weights of a Megatron rank carry LoRA adapters of Megatron-Bridge, and with which factors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.trainers.megatron.model import Held, ModelTensors
from verl_sync_plugin.trainers.megatron.trace import NotACopyError

_REMEDY = f"Leave their modules out of actor_rollout_ref.model.lora.target_modules, or {TURN_OFF}"
_PLAIN = ("ParallelLinearAdapter", "GroupedExpertLinearAdapter")


@dataclass(frozen=True)
class AdaptedWeight:
    """One weight of this rank: ``scaling * B @ A`` is added to its local part.

    Attributes:
        name: Megatron's global name.
        a, b: keys of the factors, alike on the ranks that share them.
        place_a, place_b: where this rank's parts of them are in ``ModelTensors.tensors``.
        expert: the factors' index in those of several experts; ``None`` where a factor is a matrix.
        adapter: Megatron-Bridge's module.
        experts: it belongs to experts, whose factors are split by expert tensor parallelism.
    """

    name: str
    a: str
    b: str
    place_a: int
    place_b: int
    expert: int | None
    adapter: Any
    experts: bool
    magnitude: None = None
    plain: bool = True
    transposed: bool = False

    @property
    def rank(self) -> int:
        """Of the adapter."""
        return int(self.adapter.dim)

    @property
    def scaling(self) -> float:
        """What the product of the factors is multiplied with, as the trainer does now."""
        return float(self.adapter.alpha / self.adapter.dim)

    @property
    def keys(self) -> tuple[str, ...]:
        """Of everything the merge needs."""
        return (self.a, self.b)

    def columns(self, shape: tuple[int, ...]) -> int:
        """Elements of the weight per row."""
        return shape[-1]


def adapted_weights(model: ModelTensors, names: dict[int, str]) -> dict[int, AdaptedWeight]:
    """The adapted weights of a rank by their places in ``model.tensors``.

    Args:
        names: Megatron's global names of what travels, by place.

    Raises:
        ValueError: the trainer changes a parameter that would never arrive; names it and the remedy.
        NotACopyError: an adapter that only the bridge's own stream merges; names the module.
    """
    found: dict[int, AdaptedWeight] = {}
    factors: set[int] = set()
    for _, chunk, all_held in model.named():
        held = {each.name: each for each in all_held}
        for path, module in chunk.named_modules():
            if hasattr(module, "to_wrap") and hasattr(module, "adapter"):
                _refuse(path, module.adapter)
                for place, weight in _of(path, module.adapter, held, names):
                    found[place] = weight
                    factors |= {weight.place_a, weight.place_b}
        _refuse_lost(chunk, held, names, factors)
    return found


def _of(path: str, adapter: Any, held: dict[str, Held], names: dict[int, str]) -> Iterator[tuple[int, AdaptedWeight]]:
    a, b = (held[f"{path}.adapter.{side}.weight"] for side in ("linear_in", "linear_out"))
    wrapped = f"{path}.to_wrap.weight"
    for each in held.values():
        number = each.name.removeprefix(wrapped)
        if not each.name.startswith(wrapped) or not (number == "" or number.isdigit()) or each.place not in names:
            continue
        name = names[each.place]
        key = name if a.tensor.dim() == 3 else name.partition(".to_wrap.")[0]
        expert = int(number) if a.tensor.dim() == 3 else None
        places, is_expert = (a.place, b.place), ".experts." in path
        yield each.place, AdaptedWeight(name, f"{key}.A", f"{key}.B", *places, expert, adapter, is_expert)


def _refuse(path: str, adapter: Any) -> None:
    """Raises NotACopyError when an adapter is not one whose factors make the delta and nothing else."""
    kind = type(adapter).__name__
    activation = type(getattr(adapter, "activation", None) or torch.nn.Identity()).__name__
    if kind not in _PLAIN or activation != "Identity":
        raise NotACopyError(f"the adapter of {path!r} ({kind}) is merged by the bridge")


def _refuse_lost(chunk: torch.nn.Module, held: dict[str, Held], names: dict[int, str], factors: set[int]) -> None:
    """Raises ValueError when the trainer changes a parameter that would never arrive."""
    trained = {name for name, parameter in chunk.named_parameters() if parameter.requires_grad and parameter.numel()}
    lost = [name for name in trained if held[name].place not in factors and held[name].place not in names]
    if lost:
        raise ValueError(
            f"parameters that are trained, but not exported by Megatron-Bridge: {', '.join(sorted(lost)[:5])}. "
            f"{_REMEDY}."
        )
