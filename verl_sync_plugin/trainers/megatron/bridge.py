# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge, verl's default bridge, read as a description: which Megatron parameters make up which HF tensors.

Megatron-Bridge names for each parameter a mapping, which gathers the parts of all ranks and converts them. Here a copy
of it that cannot communicate runs once on meta tensors (``CopyTrace``): where it would gather, it gets all parts; where
it would broadcast, it keeps what it has. Layers differ only in their numbers, so each kind of parameter is traced once.

Source: ``verl.workers.engine.megatron.delta_export`` replaces a mapping's helpers for communication, too, and marks
elements with NaN.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl_sync_plugin.layout.load_map import joined, starts_of
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import EMPTY_SHARE, View
from verl_sync_plugin.trainers.base import dtype_name
from verl_sync_plugin.trainers.megatron.model import HeldTensor, ModelTensors
from verl_sync_plugin.trainers.megatron.parts import Part
from verl_sync_plugin.trainers.megatron.stream import Guard

# Numbers of layers and of experts in a name, not the 1 of linear_fc1
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|(?<=weight)\d+$|(?<=bias)\d+$")
_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")  # padded where tensor parallelism does not divide it
ADAPTED = ".to_wrap."  # in Megatron's name of a weight that an adapter wraps
_COMPUTED_BY_ENGINES = ".rotary_emb.inv_freq"  # some checkpoints hold it; no engine reads it
# More runs than this, shorter than that, mean a conversion that shuffles single elements of a large weight. To plan the
# 2.9 million of a transposed projection took minutes and gigabytes
_MOST_RUNS, _SHORT = 1 << 16, 16
_NONE = np.empty(0, dtype=np.int64)
AllParts = Callable[[torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True)
class _Product:
    """One HF tensor that a Megatron parameter yields, and what each part of the parameter contributes. ``key`` is that
    of its name among ``_names``; ``None`` where the bridge gave it another."""

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
    bridge makes no conversion task for a tied head, so the embedding comes once."""

    def __init__(self, bridge: Any, timeout_seconds: float) -> None:
        self._bridge = bridge
        self._guard = Guard(timeout_seconds)
        # With the config, whose id is part of the key and so must not be used again
        self._kinds: dict[tuple[object, ...], tuple[_Kind, object]] = {}

    def read(self, model: ModelTensors, run: str) -> dict[int, Part]:
        """This rank's weights by their places in ``model.tensors``, without what the bridge does not export. All ranks
        read at the same time: the bridge's list of tasks takes one exchange of names in the pipeline group. ``run``:
        see ``Guard.watching``. Raises NotACopyError, with name, for a parameter that may become no copy of itself."""
        with self._guard.watching(run):
            listed = self._bridge.get_conversion_tasks(model.chunks)
        exported = (task for task in listed if task and task.param_weight is not None and task.param_weight.numel())
        tasks = {(task.vp_stage, task.param_name): task for task in exported}
        found, computed = dict[int, Part](), list[str]()
        for number, _, all_held in model.named():
            for held in all_held:
                if (task := tasks.pop((number, held.name), None)) is not None:
                    try:
                        found[held.place] = self._describe(task, held)
                    except NotACopyError as error:
                        computed.append(str(error))
        others = "is neither a parameter nor the bias of a router"
        computed += [f"{task.global_param_name!r} {others}" for task in tasks.values()]
        for text in sorted(computed, key=lambda each: ADAPTED not in each):  # first one of an adapted weight
            raise NotACopyError(text)
        return found

    def _describe(self, task: Any, held: HeldTensor) -> Part:
        name, mapping, tensor = task.global_param_name, task.mapping, held.tensor
        data: Any = tensor.data
        if type(data) is not torch.Tensor:
            raise NotACopyError(f"parameter {name!r} is stored as {type(data).__name__}")
        if getattr(mapping, "is_grouped_export", False):
            raise NotACopyError(f"parameter {name!r} is stacked with those of other experts ({type(mapping).__name__})")
        kind = self._kind_of(task, tensor)
        names = _names(mapping)
        part, parts = (mapping.tp_rank, mapping.tp_size) if kind.split else (0, 1)
        views = tuple(
            View(names.get(each.key or "", each.name), each.shape, 0, math.prod(each.shape), None, each.shares[part])
            for each in kind.products
        )
        dim = int(getattr(tensor, "partition_dim", 0)) if parts > 1 else 0
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        text = f"{dtype} {shape}" + (f", part {part + 1} of {parts} along dimension {dim}" if parts > 1 else "")
        return Part(name, (part,), shape, dtype, views, (shape, parts, dim, kind.digest), text, held.buffer)

    def _kind_of(self, task: Any, tensor: torch.Tensor) -> _Kind:
        mapping, module = task.mapping, task.megatron_module
        config = getattr(module, "config", None)
        marks = (getattr(tensor, "tensor_model_parallel", None), getattr(tensor, "partition_dim", None))
        key = (
            *(type(mapping), type(module), id(config), *marks, tuple(tensor.shape), tensor.dtype),
            NUMBER.sub("#", task.global_param_name),
            NUMBER.sub("#", mapping.hf_param) if isinstance(mapping.hf_param, str) else tuple(mapping.hf_param),
        )
        if key in self._kinds:
            return self._kinds[key][0]
        kind = self._trace(task, tensor)
        if kind.products and not self._modifies and all(each.key is not None for each in kind.products):
            self._kinds[key] = kind, config
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
                wholes = {name: self._cropped(task, whole) for name, whole in converted.items()}
                shares = {name: trace.shares(whole) for name, whole in wholes.items()}
            except Exception as error:  # foreign code, on tensors and groups that it was not written for
                refused.append(str(error) if isinstance(error, NotACopyError) else repr(error))
        if refused:  # a mapping may swallow an error
            raise NotACopyError(f"parameter {task.global_param_name!r}: {refused[0]} ({type(mapping).__name__})")
        keys = {name: key for key, name in _names(mapping).items()}
        parts = slice(None) if gathered else slice(mapping.tp_rank, mapping.tp_rank + 1)
        products = tuple(_Product(keys.get(n), n, tuple(w.shape), shares[n][parts]) for n, w in wholes.items())
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
        return tensor[:rows] if task.global_param_name.replace(ADAPTED, ".").endswith(_VOCABULARY) else tensor


def _names(mapping: Any) -> dict[str, str]:
    """The HF names of a mapping by its keys for them; a single one has none."""
    return mapping.hf_param if isinstance(mapping.hf_param, dict) else {"": mapping.hf_param}


def _ranks(size: int, rank: int) -> Any:
    """Stands for a process group, with its size and this rank; torch refuses to communicate over it."""
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def _silent(mapping: Any, module: torch.nn.Module, all_parts: AllParts) -> Any:
    """A copy of a mapping that communicates nothing; ``all_parts`` answers for tensor-parallel parts."""
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
        setattr(made, name, _ranks(get_pg_size(group), get_pg_rank(group)))
    made.pp_group = _ranks(1, 0)  # only the stage that owns a parameter traces it
    made.gather_from_tp_ranks = all_parts
    made.gather_from_ep_ranks = lambda tensor, module, name: {str(name): tensor}  # each rank tells of its own experts
    made.broadcast_from_pp_rank = lambda tensor, cache_key=None: tensor
    made.broadcast_obj_from_pp_rank = lambda value, cache_key=None: value
    return made


# ---- the origin of a tensor's elements, read off a function that only slices, joins and reorders. Views of meta
# tensors keep their storage, offset and strides. The few operations that make a new storage without computing (``cat``,
# ``clone``, rows taken by number) are followed by runs: which elements of which input they hold. So it takes no memory,
# and what a function does is known exactly, or it is refused.


class NotACopyError(ValueError):
    """The function computes new values, or shuffles single elements; its result is no plain copy of its inputs."""


class CopyTrace(TorchDispatchMode):
    """A dispatch mode that follows copies between meta tensors, from ``count`` inputs of one shape and dtype."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
        super().__init__()
        self._numel = math.prod(shape)
        # By storage: where runs of the inputs begin in it, and where in the inputs; these lie one after another, a gap
        # of one element between them so that no run crosses
        self._runs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._alive: list[torch.Tensor] = []  # a storage's identity is reused when it dies
        self.inputs = [torch.empty(shape, dtype=dtype, device="meta") for _ in range(count)]
        for index, tensor in enumerate(self.inputs):
            self._runs[_identity(tensor)] = np.array([0]), np.array([index * (self._numel + 1)])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._alive += _tensors(result)
        if func._schema.is_mutable:
            for tensor in _tensors(args):
                self._runs.pop(_identity(tensor), None)  # overwritten by something that is not followed
        elif func is torch.ops.aten.cat.default:
            self._cat(result, args[0], args[1] if len(args) > 1 else 0)
        elif func in (torch.ops.aten.clone.default, torch.ops.aten.contiguous.default):
            self._cat(result, [args[0]], 0)
        elif func is torch.ops.aten.index.Tensor:
            self._select(result, args[0], args[1])
        return result

    def shares(self, result: torch.Tensor) -> tuple[tuple[Run, ...], ...]:
        """By input the runs from it, flat, to ``result``, flat, in ascending order of target; ``EMPTY_SHARE`` where it
        contributes nothing. Raises NotACopyError where the result is not the inputs alone."""
        targets, origins = self._read(result)
        found: list[list[Run]] = [[] for _ in self.inputs]
        for (target, end), origin in zip(pairwise([*targets.tolist(), result.numel()]), origins.tolist(), strict=True):
            number, source = divmod(origin, self._numel + 1)
            found[number].append(Run(source, target, end - target))
        return tuple(tuple(_repetitions(each)) or (EMPTY_SHARE,) for each in found)

    def _cat(self, result: torch.Tensor, parts: list[torch.Tensor], dim: int) -> None:
        if any(part.dtype != result.dtype or _identity(part) not in self._runs for part in parts):
            return  # unknown stays unknown
        places, origins, position = list[np.ndarray](), list[np.ndarray](), 0
        for part in parts:
            if part.numel():
                rows, length = _addresses(result.narrow(dim, position, part.shape[dim]) if part.dim() else result)
                targets, origin = self._read(part)
                cuts = np.union1d(targets, np.arange(0, part.numel(), length))
                at = np.searchsorted(targets, cuts, "right") - 1
                places.append(rows[cuts // length] + cuts % length)
                origins.append(origin[at] + cuts - targets[at])
            position += part.shape[dim] if part.dim() else 1
        if places:
            firsts = np.concatenate(places)
            order = np.argsort(firsts)
            self._alive.append(result)
            self._runs[_identity(result)] = firsts[order], np.concatenate(origins)[order]

    def _select(self, result: torch.Tensor, source: torch.Tensor, indices: list[torch.Tensor | None]) -> None:
        """``source[rows]``, with the numbers of the rows on the CPU, is the rows one after another."""
        rows = indices[0] if len(indices) == 1 else None
        if rows is not None and rows.dim() == 1 and rows.dtype == torch.int64 and rows.device.type == "cpu":
            self._cat(result, [source.narrow(0, int(row), 1) for row in rows.tolist()], 0)

    def _read(self, tensor: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Returns where runs of the inputs begin in the tensor's own row-major order, and where in the inputs."""
        if _identity(tensor) not in self._runs:
            raise NotACopyError("its values are computed")
        if not tensor.numel():
            return _NONE, _NONE
        firsts, origins = self._runs[_identity(tensor)]
        rows, length = _addresses(tensor)
        low, high = (np.searchsorted(firsts, rows + at, "right") - 1 for at in (0, length - 1))
        counts = high - low + 1
        _bounded(int(counts.sum()), tensor.numel())
        row = np.repeat(np.arange(len(rows)), counts)
        run = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + low[row]
        begin = np.maximum(firsts[run], rows[row])
        targets, found = row * length + begin - rows[row], origins[run] + begin - firsts[run]
        fresh = np.append(True, np.diff(found) != np.diff(targets))
        return targets[fresh], found[fresh]


def _identity(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(nested: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


def _bounded(runs: int, elements: int) -> None:
    if runs > _MOST_RUNS and runs * _SHORT > elements:
        raise NotACopyError("its elements are shuffled one by one")


def _addresses(tensor: torch.Tensor) -> tuple[np.ndarray, int]:
    """(storage addresses of consecutive runs in row-major order, their length), in elements."""
    dims = joined((size, step, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    length = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
    _bounded(tensor.numel() // length, tensor.numel())
    return starts_of(int(tensor.storage_offset()), ((size, step) for size, step, _ in dims)), length


def _repetitions(runs: list[Run]) -> list[Run]:
    """Runs of one input, joined while they are equally wide and at one distance."""
    found: list[Run] = []
    for run in runs:
        last = found[-1] if found else None
        if last is not None and run.width == last.width:
            stride, target_stride = (run.source - last.source) // last.count, (run.target - last.target) // last.count
            next_one = (last.source + last.count * stride, last.target + last.count * target_stride)
            alike = last.count == 1 or (stride, target_stride) == (last.source_stride, last.target_stride)
            if (run.source, run.target) == next_one and stride >= run.width and alike:
                found[-1] = Run(last.source, last.target, run.width, last.count + 1, stride, target_stride)
                continue
        found.append(run)
    return found
