# SPDX-License-Identifier: Apache-2.0
"""verl's vanilla bridge (mbridge), read as a description: which Megatron parameters make up which HF tensors.

The functions with which mbridge merges tensor-parallel parts and converts to HF run once on meta tensors (see
``trace.py``). Layers differ only in their numbers, so each kind of parameter is traced once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.trainers.base import dtype_name
from verl_sync_plugin.trainers.megatron.layout import LocalParameter, Product
from verl_sync_plugin.trainers.megatron.model import Held, ModelTensors
from verl_sync_plugin.trainers.megatron.reading import NUMBER, LayoutReader, product_of, refuse_wrapped
from verl_sync_plugin.trainers.megatron.trace import CopyTrace, NotACopyError

_EXPERTS = ".mlp.experts.linear_fc"


class MBridgeReader(LayoutReader):
    """Args: ``bridge``: ``engine.bridge`` where ``vanilla_mbridge=True``."""

    def __init__(self, bridge: Any) -> None:
        self._bridge = bridge
        self._known: dict[tuple[object, ...], list[Product]] = {}

    @property
    def tied(self) -> bool:  # type: ignore[override]
        """See ``LayoutReader``."""
        return bool(getattr(self._bridge.hf_config, "tie_word_embeddings", False))

    def read(self, model: ModelTensors, run: str) -> dict[int, LocalParameter]:
        """See ``LayoutReader``; no collective."""
        found = {}
        for _, module, held in model.named():
            names = self._bridge._weight_name_mapping_mcore_local_to_global(module)
            found.update({each.place: self._describe(names[each.name], each) for each in held})
        return found

    def _describe(self, name: str, held: Held) -> LocalParameter:
        refuse_wrapped(name, held.tensor)
        tensor, mpu = held.tensor, self._bridge.mpu
        part, parts = 0, 1
        if _EXPERTS in name:
            # TransformerEngine marks experts as split and names a dimension whether they are or not
            part, parts = mpu.etp_rank, mpu.etp_size
        elif getattr(tensor, "tensor_model_parallel", False):
            part, parts = mpu.tp_rank, mpu.tp_size
        dim = int(getattr(tensor, "partition_dim", 0)) if parts > 1 else 0
        found = LocalParameter(name, tuple(tensor.shape), dtype_name(tensor.dtype), part, parts, dim, held.buffer)
        return replace(found, products=tuple(self._products(found)))

    def _products(self, parameter: LocalParameter) -> list[Product]:
        p = parameter
        key = (NUMBER.sub("#", p.name), p.shape, p.dtype, p.parts, p.dim)
        numbered = NUMBER.search(p.name) is not None
        if numbered and key in self._known:
            names = self._names(p)
            if len(names) == len(self._known[key]):
                return [replace(known, name=name) for name, known in zip(names, self._known[key], strict=True)]
        products = self._trace(parameter)
        if numbered and [product.name for product in products] == self._names(p):
            self._known[key] = products
        return products

    def _names(self, parameter: LocalParameter) -> list[str]:
        return list(self._bridge._weight_name_mapping_mcore_to_hf(parameter.name))

    def _trace(self, parameter: LocalParameter) -> list[Product]:
        dtype = getattr(torch, parameter.dtype)
        try:
            with CopyTrace(parameter.shape, dtype, parameter.parts) as trace:
                names, tensors = self._convert(parameter, trace.inputs)
                return [product_of(trace, name, t, parameter.parts) for name, t in zip(names, tensors, strict=True)]
        except NotACopyError as error:
            raise ValueError(
                f"parameter {parameter.name!r} becomes its HF tensors by more than slicing and joining ({error}); "
                f"weight sync does not support this model with mbridge. Set actor_rollout_ref.actor.megatron."
                f"vanilla_mbridge=False where Megatron-Bridge is installed, or {TURN_OFF}."
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
