# SPDX-License-Identifier: Apache-2.0
"""Records what a model's own ``load_weights`` would copy where, without copying anything.

The sources are meta tensors, one per name of the sync: they hold no bytes, they are on no CPU (some models load CPU
tensors in threads, which no dispatch mode sees), and every view of one shares its storage, by which it is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.engine.model import EngineModel
from verl_sync_plugin.layout.tensors import Entry

TO_TRAIN = f"To train this model, {TURN_OFF}"
aten = torch.ops.aten
# The results of these hold a tensor's values, and constants at most
MOVES = (
    aten.clone.default, aten.cat.default, aten.stack.default, aten.index.Tensor, aten.index_select.default,
    aten.constant_pad_nd.default, aten.repeat.default, aten.flip.default, aten.roll.default, aten.zero_.default,
)  # fmt: skip


@dataclass(frozen=True)
class Write:
    """A write into the model.

    Attributes:
        name: of the tensor that it comes from; empty where it comes from none.
        target: the elements that are written.
        source: the elements of the tensor that are copied (a view of its meta tensor), or the constant that is written;
            ``None`` where it is something else.
    """

    name: str
    target: torch.Tensor
    source: torch.Tensor | float | None = None


@dataclass
class Recording:
    """The record of one dry ``load_weights``.

    Attributes:
        writes: into the model, in their order.
        refused: names of tensors that were not only viewed and copied, and what was done.
        taken: names in ``refused`` of which something reached the model or the host.
        computed: names in ``refused`` whose values may have been changed on the way, depending on their dtype.
        computed_from: storages of the model from which the load computed something.
    """

    writes: list[Write] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    computed: set[str] = field(default_factory=set)
    computed_from: set[int] = field(default_factory=set)


def meta_of(entry: Entry) -> torch.Tensor:
    """A tensor of this layout without bytes, with a storage of its own."""
    dtype = getattr(torch, entry.dtype)
    if entry.strides is None:
        return torch.empty(entry.shape, dtype=dtype, device="meta")
    return torch.empty_strided(entry.shape, entry.strides, dtype=dtype, device="meta")


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, for as long as that lives."""
    return tensor.untyped_storage()._cdata


def model_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """All parameters and buffers that hold anything, by name, tied ones under each of theirs."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return [(name, tensor) for name, tensor in named if tensor.numel()]


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """An operation's tensors. The same by torch's ``tree_flatten`` was 40 % of the recording's time."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


class _Recorder(TorchDispatchMode):
    """Watches one load. Writes into the model are noted and left out; reading it is real."""

    def __init__(self, model: torch.nn.Module, sources: Sequence[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.recording = Recording()
        self.names = {storage_of(tensor): name for name, tensor in sources}
        self._dtypes = {storage_of(tensor): tensor.dtype for _, tensor in sources}
        self._keep = [tensor.detach() for _, tensor in model_tensors(model)]  # a freed one's identity is used again
        self._targets: dict[int, set[torch.dtype]] = {}  # dtypes of the model's tensors, by storage
        for tensor in self._keep:
            self._targets.setdefault(storage_of(tensor), set()).add(tensor.dtype)
        # In inference mode ``to`` and ``reshape`` come whole, and count as views, although they may copy
        self._views = not torch.is_inference_mode_enabled()
        self._derived: dict[int, set[str]] = {}  # results of anything else, by storage
        self._joined: dict[int, tuple[torch.Size, Sequence[torch.Tensor], int]] = {}  # of cat; parts, dimension
        self._zeroed: set[int] = set()  # storages of sources that the load has filled with zeros

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view and self._views:  # shares its storage, by which everything is known here; most operations
            return func(*args, **kwargs)
        tensors = [*_tensors_in(args), *_tensors_in(kwargs.values())]
        names = self._names(tensors)
        if func is aten.copy_.default and names:
            return self._copy(args[0], args[1], names)
        written = next(_tensors_in((kwargs.get("out"), *args[:1])), None)
        if func._schema.is_mutable and written is not None and storage_of(written) in self._targets:
            return self._write(func, written, args, names)
        if not names:
            return self._other(func, args, kwargs, tensors)
        return self._touch(func, args, kwargs, names)

    def _names(self, tensors: Sequence[torch.Tensor]) -> set[str]:
        found: set[str] = set()
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage in self.names:
                found.add(self.names[storage])
            else:
                found |= self._derived.get(storage, set())
        return found

    def _refuse(self, names: Iterable[str], why: str, taken: bool = False, computed: bool = False) -> None:
        for name in sorted(names):  # equal ranks make equal maps
            self.recording.refused.setdefault(name, why)
        if taken:
            self.recording.taken.update(names)
        if computed:
            self.recording.computed.update(names)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, names: set[str]) -> torch.Tensor:
        storage, writes = storage_of(source), self.recording.writes
        joined, parts, dim = self._joined.get(storage, (None, (), 0))
        if storage_of(target) not in self._targets:
            # The model may keep it without naming it as one of its tensors
            self._refuse(names, "is copied elsewhere", taken=True, computed=True)
        elif self._reinterprets(target, source):
            # A replay knows the dtypes of tensors and parameters, and would cast where the model moves bytes
            self._refuse_written(names, "is copied through a view of another dtype", target)
        elif storage in self._zeroed:
            writes.append(Write("", target.detach(), 0.0))
        elif storage in self.names:
            writes.append(Write(self.names[storage], target.detach(), source))
        elif joined == source.shape == target.shape and source.is_contiguous():
            pieces = target.detach().split([part.shape[dim] for part in parts], dim)
            writes.extend(Write(self.names[storage_of(p)], piece, p) for p, piece in zip(parts, pieces, strict=True))
        else:
            self._refuse_written(names, "is changed before it is copied", target)
        return target

    def _refuse_written(self, names: Iterable[str], why: str, target: torch.Tensor) -> None:
        self._refuse(names, why, taken=True)
        self.recording.writes.extend(Write(name, target.detach()) for name in sorted(names))

    def _reinterprets(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """True if either side is viewed as other elements than it has."""
        declared = self._dtypes.get(storage_of(source), source.dtype)
        lazily_changed = source.is_neg() or source.is_conj()
        return source.dtype != declared or target.dtype not in self._targets[storage_of(target)] or lazily_changed

    def _write(self, func: Any, target: torch.Tensor, args: Any, names: set[str]) -> Any:
        if names:
            self._refuse_written(names, f"goes through {func}", target)
            self.recording.computed.update(names)
        else:
            value = float(args[1]) if func is aten.fill_.Scalar else 0.0 if func is aten.zero_.default else None
            self.recording.writes.append(Write("", target.detach(), value))
        return target

    def _other(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        result = func(*args, **kwargs)
        if any(storage_of(tensor) in self._targets for tensor in tensors):
            made = list(_tensors_in((result,)))
            if not made or any(storage_of(value) not in self._targets for value in made):
                self.recording.computed_from.update({storage_of(t) for t in tensors} & self._targets.keys())
        return result

    def _touch(self, func: Any, args: Any, kwargs: Any, names: set[str]) -> Any:
        """Anything but a copy that involves a source: views pass, a join is noted, the rest refuses the names."""
        if func is aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            return args[0].detach()  # to another device: the bytes stay what they are
        if func is aten.zero_.default and args[0].untyped_storage().nbytes() == args[0].nbytes:  # all of what is given
            self._zeroed.add(storage_of(args[0]))
            return args[0]
        if func is aten._local_scalar_dense.default:
            self._refuse(names, "is read by the host", taken=True, computed=True)
            return 0
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        result = func(*args, **kwargs)
        made = list(_tensors_in((result,)))
        known = [storage_of(value) in self.names or storage_of(value) in self._derived for value in made]
        if made and all(known) and not func._schema.is_mutable:
            return result  # views
        if not (func is aten.cat.default and self._join(args, kwargs, made[0])):
            self._refuse(names, f"goes through {func}", computed=func not in MOVES)
        for value in made:
            self._keep.append(value)
            self._derived[storage_of(value)] = names
        return result

    def _join(self, args: Any, kwargs: Any, result: torch.Tensor) -> bool:
        storages = {storage_of(part) for part in args[0]}
        as_given = all(self._dtypes.get(storage_of(part)) == part.dtype == result.dtype for part in args[0])
        if not as_given or not self._zeroed.isdisjoint(storages):
            return False
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(result.dim(), 1)
        self._joined[storage_of(result)] = result.shape, args[0], dim
        return True


def record(model: EngineModel, sources: Sequence[Entry], remedy: str = TO_TRAIN) -> Recording:
    """One dry ``load_weights`` over all ``sources`` of a sync, in the order they will come; changes nothing in the
    model that a sync would keep. Raises ValueError where the load needs values, or keeps a tensor that it is given."""
    tensors = [(source.name, meta_of(source)) for source in sources]
    recorder = _Recorder(model.module, tensors)
    try:
        with torch.no_grad(), recorder:
            model.load_weights(iter(tensors))
    except Exception as error:  # whatever a model's loader makes of meta tensors
        why = f"its load cannot be recorded: {type(error).__name__}: {error}"
        raise ValueError(f"{model.engine}'s {model.name}: {why}. {remedy}.") from error
    if kept := _kept(model.module, recorder.names):
        why = f"its load keeps {kept} instead of copying it"
        raise ValueError(f"{model.engine}'s {model.name}: {why}. {remedy}.")
    return recorder.recording


def _kept(model: torch.nn.Module, known: dict[int, str]) -> str:
    """The name of a tensor of the sync that a module of the model keeps, which makes no operation; else empty."""
    for module in model.modules():
        for value in (*vars(module).values(), *module._parameters.values(), *module._buffers.values()):
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                return known.get(storage_of(value), "a tensor it was given")
    return ""
