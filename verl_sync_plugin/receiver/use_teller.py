# SPDX-License-Identifier: Apache-2.0
"""Tells the trainer which tensors the model uses: from the recording of its load, or by watching the load itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from verl_sync_plugin.layout.tensors import Entry
from verl_sync_plugin.receiver.engine_model import EngineModel
from verl_sync_plugin.receiver.recording import Source
from verl_sync_plugin.receiver.uses import Runs, own_runs, readings_of_uses
from verl_sync_plugin.transport.protocol import Used

Tensors = Iterator[tuple[str, torch.Tensor]]


class UseTeller:
    """Of one model and one manifest.

    Args:
        model: is named to the trainer, and knows what it rightly leaves alone.
        sources: the tensors.
        buckets: the entries of all buckets.
        numbers: of the tensors.
    """

    def __init__(
        self,
        model: EngineModel,
        sources: Sequence[Source],
        buckets: Sequence[Sequence[Entry]],
        numbers: Mapping[str, int],
    ) -> None:
        self._model = model
        self._sources = sources
        self._buckets = buckets
        self._numbers = numbers
        self._recorded: Mapping[str, Runs] | None = None
        self._touched: Touched | None = None  # where the load could not be recorded
        self._wider: tuple[tuple[str, tuple[int, ...]], ...] = ()
        self._used: Used | None = None
        self._told: Used | None = None

    def recorded(self, uses: Mapping[str, Runs] | None, wider: Mapping[str, torch.dtype]) -> None:
        """Takes in what a new recording says; ``None``: it could not be recorded."""
        self._recorded, self._used = uses, None
        of_dtype: dict[str, list[int]] = {}
        for name, dtype in wider.items():
            of_dtype.setdefault(str(dtype).removeprefix("torch."), []).append(self._numbers[name])
        self._wider = tuple((dtype, tuple(numbers)) for dtype, numbers in of_dtype.items())
        self._touched = Touched() if uses is None else None

    @property
    def known(self) -> bool:
        """Whether it has been found out what the model uses."""
        return self._used is not None and self._used.readings is not None

    def watching(self) -> AbstractContextManager[object]:
        """Around the loads of a sync: sees what is used where that is still to be found out."""
        return self._touched or nullcontext()

    def load(self, load_weights: Callable[[Tensors], Any], tensors: Tensors) -> None:
        """Has the model load some tensors, watched if need be."""
        if self._touched is None:
            load_weights(tensors)
            return
        load_weights((name, self._touched.lend(name, tensor)) for name, tensor in tensors)
        self._touched.taken_back()

    def use(self, loaded: bool) -> Used:
        """What the model uses of every tensor; counts as told.

        Args:
            loaded: all buckets have been loaded, which tells what a recording could not.
        """
        if self._used is None or (loaded and self._touched is not None):
            uses = self._recorded
            if loaded and self._touched is not None:
                uses, self._touched = self._touched.uses(self._sources), None
            parts = self._sources, self._buckets, self._numbers, self._model.why_skipped
            readings = None if uses is None else readings_of_uses(uses, *parts)
            name = f"{self._model.engine}'s {self._model.name}"
            self._used = Used(name, readings, self._model.layers, self._wider)
        self._told = self._used
        return self._used

    def news(self) -> Used | None:
        """At the end of a sync: what the model uses; ``None`` when that has been told."""
        told = self._told
        return None if (used := self.use(loaded=True)) == told else used


class Touched(TorchDispatchMode):
    """While entered, notes which of the lent tensors the model does more with than take views of.

    It serves models whose load cannot be recorded. It is the weaker proof: a tensor counts as used whole when any part
    of it is, and what other threads do is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lent: dict[str, tuple[int, int]] = {}
        self.names: set[str] = set()

    def lend(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Notes where a tensor lies that the model is about to get."""
        self._lent[name] = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return tensor

    def uses(self, sources: Sequence[Source]) -> dict[str, Runs]:
        """What was used, as ``uses_in`` has it."""
        return {source.name: own_runs(source) if source.name in self.names else () for source in sources}

    def taken_back(self) -> None:
        """The memory of all tensors lent so far may hold something else from now on."""
        self._lent = {}

    def __torch_dispatch__(self, func: torch._ops.OpOverload, types: object, args=(), kwargs=None) -> object:  # type: ignore[no-untyped-def]
        if self._lent and not func.is_view:
            for value in tree_flatten((args, kwargs or {}))[0]:
                if isinstance(value, torch.Tensor) and value.numel():
                    self._note(value.data_ptr())
        return func(*args, **(kwargs or {}))

    def _note(self, address: int) -> None:
        for name, (first, end) in list(self._lent.items()):
            if first <= address < end:
                self.names.add(name)
                del self._lent[name]
