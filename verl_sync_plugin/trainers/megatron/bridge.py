# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge, verl's default bridge, read as a description: which Megatron parameters make up which HF tensors.

Megatron-Bridge names for each parameter a mapping, an object that gathers the parts of all ranks and converts them.
Here a copy of it that cannot communicate runs once on meta tensors (see ``trace.py``): where it would gather, it gets
all parts; where it would broadcast, it keeps what it has. Layers differ only in their numbers, so each kind of
parameter is traced once.

Source: that a mapping tells its layout when its helpers for communication are replaced, is the method of
``verl.workers.engine.megatron.delta_export``, which marks elements with NaN.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import View
from verl_sync_plugin.trainers.base import dtype_name
from verl_sync_plugin.trainers.joint import Part
from verl_sync_plugin.trainers.megatron.model import Held, ModelTensors
from verl_sync_plugin.trainers.megatron.stream import Guard
from verl_sync_plugin.trainers.megatron.trace import CopyTrace, NotACopyError

# Numbers of layers and of experts in a name, not the 1 of linear_fc1
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|(?<=weight)\d+$|(?<=bias)\d+$")
_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")  # padded where tensor parallelism does not divide it
_COMPUTED_BY_ENGINES = ".rotary_emb.inv_freq"  # some checkpoints hold it; no engine reads it
AllParts = Callable[[torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True)
class _Product:
    """One HF tensor that a Megatron parameter yields: the key of its name in the mapping's ``hf_param`` (empty where
    that is a single name, ``None`` where it is none of them), name and shape, and what each part of the parameter
    contributes."""

    key: str | None
    name: str
    shape: tuple[int, ...]
    shares: tuple[tuple[Run, ...], ...]


@dataclass(frozen=True)
class _Kind:
    """The HF tensors of all parameters that differ only in their numbers. ``split``: the mapping gathers parts;
    ``digest`` is of all shares, by which ranks compare them."""

    split: bool
    products: tuple[_Product, ...]
    digest: str


class BridgeReader:
    """Reads one rank's weights as Megatron-Bridge's ``AutoBridge`` would convert them; keeps what it has traced. The
    bridge makes no conversion task for a tied head, so the embedding comes once. ``chunks`` are Megatron's as the
    bridge is given them."""

    def __init__(self, bridge: Any, chunks: list[torch.nn.Module], timeout_seconds: float) -> None:
        self._bridge = bridge
        self._chunks = chunks
        self._guard = Guard(timeout_seconds)
        self._kinds: dict[tuple[object, ...], _Kind] = {}
        self._configs: list[object] = []  # held, since kinds are told apart by their identities

    def read(self, model: ModelTensors, run: str) -> dict[int, Part]:
        """This rank's weights by their places in ``model.tensors``, without what the bridge does not export. All ranks
        read at the same time: the bridge's list of tasks takes one exchange of names in the pipeline group. ``run``:
        see ``Guard.begin``. Raises NotACopyError, with its name, for a parameter that becomes no copy of itself, or of
        which that cannot be told."""
        self._guard.begin(run)
        with self._guard.watching():
            listed = self._bridge.get_conversion_tasks(self._chunks)
        exported = (task for task in listed if task and task.param_weight is not None and task.param_weight.numel())
        tasks = {(task.vp_stage, task.param_name): task for task in exported}
        found = {}
        for number, _, all_held in model.named():
            for held in all_held:
                task = tasks.pop((number, held.name), None)
                if task is not None:
                    found[held.place] = self._describe(task, held)
        for task in tasks.values():
            raise NotACopyError(f"{task.global_param_name!r} is neither a parameter nor the bias of a router")
        return found

    def _describe(self, task: Any, held: Held) -> Part:
        name, mapping, tensor = task.global_param_name, task.mapping, held.tensor
        data: Any = tensor.data
        if type(data) is not torch.Tensor:
            raise NotACopyError(f"parameter {name!r} is stored as {type(data).__name__}")
        if getattr(mapping, "is_grouped_export", False):
            raise NotACopyError(f"parameter {name!r} is stacked with those of other experts ({type(mapping).__name__})")
        kind = self._kind_of(task, tensor)
        names = mapping.hf_param if isinstance(mapping.hf_param, dict) else {"": mapping.hf_param}
        part, parts = (mapping.tp_rank, mapping.tp_size) if kind.split else (0, 1)
        views = tuple(
            View(names.get(each.key or "", each.name), each.shape, 0, prod(each.shape), None, each.shares[part])
            for each in kind.products
        )
        dim = int(getattr(tensor, "partition_dim", 0)) if parts > 1 else 0
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        common = shape, parts, dim, tuple((view.name, view.shape) for view in views), kind.digest
        text = f"{dtype} {shape}" + (f", part {part + 1} of {parts} along dimension {dim}" if parts > 1 else "")
        return Part(name, (part,), shape, dtype, views, common, text, held.buffer)

    def _kind_of(self, task: Any, tensor: torch.Tensor) -> _Kind:
        mapping, module = task.mapping, task.megatron_module
        config = getattr(module, "config", None)
        marks = (getattr(tensor, "tensor_model_parallel", None), getattr(tensor, "partition_dim", None))
        key = (
            *(type(mapping), type(module), id(config), *marks, tuple(tensor.shape), tensor.dtype),
            NUMBER.sub("#", task.global_param_name),
            NUMBER.sub("#", str(mapping.hf_param)) if isinstance(mapping.hf_param, str) else tuple(mapping.hf_param),
        )
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._trace(task, tensor)
            if kind.products and not self._modifies and all(each.key is not None for each in kind.products):
                self._kinds[key] = kind
                self._configs.append(config)
        return kind

    def _trace(self, task: Any, tensor: torch.Tensor) -> _Kind:
        """Raises NotACopyError when values are computed or the mapping cannot run like this; names the parameter."""
        mapping, gathered, refused = task.mapping, [], []
        with CopyTrace(tuple(tensor.shape), tensor.dtype, mapping.tp_size) as trace:
            mine = trace.inputs[mapping.tp_rank]

            def all_parts(part: torch.Tensor) -> list[torch.Tensor]:
                if part is not mine:
                    refused.append("its parts are changed before they are gathered")
                gathered.append(part)
                return trace.inputs

            try:
                silent = _silent(mapping, task.megatron_module, all_parts)
                converted = self._modified(task, dict(silent.megatron_to_hf(mine, task.megatron_module)))
                found = [
                    (name, tuple(cropped.shape), trace.shares(cropped, mapping.tp_size if gathered else 1))
                    for name, cropped in ((name, self._cropped(task, whole)) for name, whole in converted.items())
                ]
            except Exception as error:  # foreign code, on tensors and groups that it was not written for
                refused.append(str(error) if isinstance(error, NotACopyError) else repr(error))
        if refused:  # a mapping may swallow an error
            raise NotACopyError(f"parameter {task.global_param_name!r}: {refused[0]} ({type(mapping).__name__})")
        keys = {name: key for key, name in mapping.hf_param.items()} if isinstance(mapping.hf_param, dict) else {}
        keys = keys or {mapping.hf_param: ""}
        products = tuple(_Product(keys.get(name), name, shape, shares) for name, shape, shares in found)
        digest = hashlib.sha256(repr([product.shares for product in products]).encode()).hexdigest()[:16]
        return _Kind(bool(gathered), products, digest)

    @property
    def _modifies(self) -> bool:
        """True if this model's bridge changes what mappings return, which may depend on the layer."""
        from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge

        own = type(self._bridge._model_bridge).maybe_modify_converted_hf_weight
        return own is not MegatronModelBridge.maybe_modify_converted_hf_weight

    def _modified(self, task: Any, converted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The result as the bridge of some models still changes it after the mapping."""
        if not self._modifies:
            return converted
        bridge, pretrained = self._bridge._model_bridge, self._bridge.hf_pretrained
        bridge.hf_config = getattr(pretrained, "config", pretrained)
        modified = bridge.maybe_modify_converted_hf_weight(task, converted, getattr(pretrained, "state", {}))
        return {name: tensor for name, tensor in modified.items() if not name.endswith(_COMPUTED_BY_ENGINES)}

    def _cropped(self, task: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Without the rows that pad a vocabulary, which no checkpoint has."""
        pretrained = self._bridge.hf_pretrained
        rows = getattr(getattr(pretrained, "config", pretrained).get_text_config(), "vocab_size", None)
        name = task.global_param_name.replace(".to_wrap.", ".")
        padded = rows is not None and name.endswith(_VOCABULARY) and tensor.shape[0] > rows
        return tensor[:rows] if padded else tensor


class _Ranks:
    """Stands for a process group: its size and this rank's place in it. torch does not know it, and refuses to
    communicate over it."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def _silent(mapping: Any, module: torch.nn.Module, all_parts: AllParts) -> Any:
    """A copy of a mapping, and of the mappings in it, that computes with the sizes of the groups and communicates
    nothing; ``all_parts`` answers where it would gather the tensor-parallel parts."""
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping
    from megatron.core.utils import get_pg_rank, get_pg_size

    made = copy.copy(mapping)
    if hasattr(made, "_detect_parallelism_type"):  # it chooses its mapping when it first sees the module
        made._mapping = made._get_or_create_mapping(made._detect_parallelism_type(module))
    for name, value in list(vars(made).items()):
        if isinstance(value, MegatronParamMapping):
            setattr(made, name, _silent(value, module, all_parts))
    for name in ("ep_group", "_tp_group", "_etp_group"):
        group = getattr(made, name, None)
        setattr(made, name, _Ranks(get_pg_size(group), get_pg_rank(group)))
    made.pp_group = _Ranks(1, 0)  # only the stage that owns a parameter traces it
    made.gather_from_tp_ranks = all_parts
    made.gather_from_ep_ranks = lambda tensor, module, name: {str(name): tensor}  # each rank tells of its own experts
    made.broadcast_from_pp_rank = lambda tensor, cache_key=None: tensor
    made.broadcast_obj_from_pp_rank = lambda value, cache_key=None: value
    return made
