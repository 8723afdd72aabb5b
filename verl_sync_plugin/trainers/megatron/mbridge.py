# SPDX-License-Identifier: Apache-2.0
"""verl's vanilla bridge (mbridge), read as a description: which Megatron parameters make up which HF tensors.

The functions with which mbridge merges tensor-parallel parts and converts to HF run once on meta tensors (see
``trace.py``). Layers differ only in their numbers, so each kind of parameter is traced once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.trainers.megatron.layout import LocalParameter
from verl_sync_plugin.trainers.megatron.trace import CopyTrace, NotACopyError

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Product:
    """One HF tensor that a Megatron parameter yields.

    Attributes:
        name: HF name.
        shape: full shape.
        shares: by part of the parameter, what it contributes.
    """

    name: str
    shape: tuple[int, ...]
    shares: tuple[tuple[Run, ...], ...]


class BridgeReader:
    """Wraps ``engine.bridge``; keeps what it has traced."""

    def __init__(self, bridge: Any) -> None:
        self._bridge = bridge
        self._known: dict[tuple[object, ...], list[Product]] = {}

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return bool(getattr(self._bridge.hf_config, "tie_word_embeddings", False))

    def products(self, parameter: LocalParameter) -> list[Product]:
        """The HF tensors of a parameter.

        Raises:
            ValueError: mbridge does not know the parameter, or computes new values; names it.
        """
        p = parameter
        key = (_NUMBER.sub("#", p.name), p.shape, p.dtype, p.parts, p.dim)
        numbered = _NUMBER.search(p.name) is not None
        if numbered and key in self._known:
            names = self._names(p.name)
            if len(names) == len(self._known[key]):
                pairs = zip(names, self._known[key], strict=True)
                return [Product(name, known.shape, known.shares) for name, known in pairs]
        products = self._trace(parameter)
        if numbered and [product.name for product in products] == self._names(p.name):
            self._known[key] = products
        return products

    def _names(self, name: str) -> list[str]:
        return list(self._bridge._weight_name_mapping_mcore_to_hf(name))

    def _trace(self, parameter: LocalParameter) -> list[Product]:
        dtype = getattr(torch, parameter.dtype)
        try:
            with CopyTrace(parameter.shape, dtype, parameter.parts) as trace:
                names, tensors = self._convert(parameter, trace.inputs)
                return [_product(trace, name, t, parameter.parts) for name, t in zip(names, tensors, strict=True)]
        except NotACopyError as error:
            raise ValueError(
                f"parameter {parameter.name!r} becomes its HF tensors by more than slicing and joining ({error}); "
                f"weight sync does not support this model. To go on, {TURN_OFF}."
            ) from error
        except (NotImplementedError, AssertionError, RuntimeError, KeyError, IndexError) as error:
            raise ValueError(
                f"mbridge cannot convert parameter {parameter.name!r} ({parameter.describe()}): {error!r}. "
                "Change the parallel layout, or set actor_rollout_ref.actor.megatron.vanilla_mbridge=False where "
                "Megatron-Bridge is installed."
            ) from error

    def _convert(self, parameter: LocalParameter, parts: list[torch.Tensor]) -> tuple[list[str], list[torch.Tensor]]:
        merged = parts[0]
        if parameter.parts > 1:
            like: Any = torch.empty(parameter.shape, device="meta")
            like.tensor_model_parallel, like.partition_dim = True, parameter.dim
            merged = self._bridge._weight_merge_across_tp(parameter.name, parts, like)
        names, tensors = self._bridge._weight_to_hf_format(parameter.name, merged)
        return list(names), list(tensors)


def _product(trace: CopyTrace, name: str, tensor: torch.Tensor, parts: int) -> Product:
    shares: list[list[Run]] = [[] for _ in range(parts)]
    for part, run in trace.runs(tensor):
        shares[part].append(run)
    return Product(name, tuple(tensor.shape), tuple(map(tuple, shares)))
