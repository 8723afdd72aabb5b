# SPDX-License-Identifier: Apache-2.0
"""The contract of a trainer: the weight stream that its engine hands out, its parameter source, and the dtypes in which
parameters travel. Must not import verl's engines: verl's import of one imports the plugin's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from verl.utils.device import get_device_name

from verl_sync_plugin.config.settings import TRAINERS, TURN_OFF, VENDOR, SyncConfig
from verl_sync_plugin.errors import RegistryConflictError
from verl_sync_plugin.layout.tensors import Shard
from verl_sync_plugin.layout.tensors import dtype_name as dtype_name
from verl_sync_plugin.lora.peft import is_adapter
from verl_sync_plugin.transport.agreement import Agreement


class ParameterSource(ABC):
    """Everything one trainer rank contributes to a sync. Lives as long as the trainer's model and keeps what it learned
    of the layout, so that a later sync only looks up where the shards are now (offloading moves them). ``group``, known
    once ``shards`` has been called, are the ranks among which bases with several owners are sharded. ``kept`` is what
    ``shards`` returns while every tensor stays the object it is, and on the device; none where each sync looks."""

    group: dist.ProcessGroup | None = None
    kept: list[Shard] | None = None

    @property
    def rank(self) -> int:
        """This rank's place among the owners of a sharded base; 0 where there are no others."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def prepares(self) -> bool:
        """True if ``prepare`` makes something of what travels."""
        return type(self).prepare is not ParameterSource.prepare

    @property
    def readable_in_place(self) -> bool:
        """True if shards may be read where they lie, after ``prepare``."""
        return not self.prepares

    def agree_on_layout(self, agreement: Agreement) -> ParameterSource:
        """Collective, before ``shards``: the ranks tell each other who holds what, where they hold different parts.
        Returns the source that reads this trainer, mostly this one; raises SyncError with one text on every rank."""
        return self

    @abstractmethod
    def shards(self) -> list[Shard]:
        """All bases in model order, the same on every rank. Raises ValueError for a parameter of an unknown layout."""

    def prepare(self, bases: tuple[int, ...], ahead: Sequence[tuple[int, ...]] = ()) -> Generator[None, None, None]:
        """Collective over ``group``, where ``prepares``: makes what the shards of one bucket's ``bases`` need from
        other ranks; what earlier calls prepared may be gone when this returns. Yields right before each collective,
        where all ranks settle (``Agreement.run``). Some of the buckets ``ahead``, in order and the same on all ranks,
        may be prepared as well. ``shards`` and ``release`` drop them."""
        yield from ()  # most sources need nothing

    def release(self) -> None:  # noqa: B027  (most sources hold nothing)
        """Drops every reference to the trainer's parameters, so that an offloaded model is not kept in memory. Where
        offloading keeps the parameters and takes their memory away (Megatron), they may be kept."""


class ServedAdapter(ABC):
    """A LoRA adapter that the engine serves itself (``lora.merge=False``), on one trainer rank; ``settings`` are fields
    of PEFT's ``LoraConfig``."""

    settings: Mapping[str, Any]

    @abstractmethod
    def gather(self, run: str) -> Generator[None, None, dict[str, torch.Tensor]]:
        """Whole factors by their names in an adapter checkpoint, in the trainer's dtype. Collective; yields right
        before each collective, where all ranks settle. ``run`` names this time, alike on all ranks and used once.
        Raises ValueError, with the remedy, for parameters that cannot be served."""

    def release(self) -> None:  # noqa: B027
        """Drops every reference to the trainer's parameters."""


class TrainerBackend(ABC):
    """Opens the sources of one of verl's training engines, on one rank, whose ``device`` computes. ``serves_adapter``:
    the engine serves the trainer's LoRA adapter itself, else it gets merged weights."""

    serves_adapter: bool = False

    def __init__(self, engine: Any, config: SyncConfig, device: torch.device, rollout_dtype: str) -> None:
        self.engine = engine
        self.config = config
        self.device = device
        self.rollout_dtype = rollout_dtype

    @abstractmethod
    def open_source(self) -> ParameterSource:
        """Called at the first sync, and again if the engine asks for other dtypes. Raises ValueError, with key, value
        and remedy, for an engine that cannot be synced."""

    def open_adapter(self, source: ParameterSource) -> ServedAdapter:
        """Opens the adapter to serve, once, where ``serves_adapter``; ``source`` is what ``open_source`` returned."""
        raise TypeError(f"{type(self).__qualname__} has no adapter to serve")

    @cached_property
    def policy(self) -> WirePolicy:
        return wire_policy(self.rollout_dtype)

    @property
    def name(self) -> str:
        """The kind of trainer, for reports."""
        return type(self).__name__.removesuffix("Trainer")

    @property
    def model(self) -> str:
        """Name of the model's folder, else of its classes, for reports."""
        path = getattr(getattr(self.engine, "model_config", None), "path", "")
        return PurePath(path).name or ", ".join(self.architectures)

    @property
    def architectures(self) -> tuple[str, ...]:
        config = getattr(getattr(self.engine, "model_config", None), "hf_config", None)
        return tuple(getattr(config, "architectures", None) or ())


@dataclass
class WirePolicy:
    """The dtypes in which a trainer's parameters travel: the widest that an engine rank keeps, never wider than the
    trainer's. ``kept``: the dtype that the engine named, by HF name; empty where it takes whatever the trainer has.
    ``dtype``: of all other floating-point parameters, and the one to which quantized ones are cast first.
    ``blocks``: rows and columns of a block of each tensor that the engine keeps in fp8."""

    dtype: torch.dtype
    kept: dict[str, str] = field(default_factory=dict)
    blocks: dict[str, tuple[int, int]] = field(default_factory=dict)
    _asked: dict[tuple[str, ...], torch.dtype] = field(default_factory=dict)

    def of_parameter(self, names: Sequence[str], dtype: torch.dtype) -> torch.dtype:
        """The wire dtype of one storage, given the trainer's dtype and all names of it and of what it holds. Adapters
        are exchanged among trainers only and keep theirs."""
        self._asked[tuple(names)] = dtype
        served = [name for name in names if not is_adapter(name)]
        if not served or not dtype.is_floating_point:
            return dtype
        kept = {self.kept[name] for name in served if name in self.kept and name not in self.blocks}
        if "" in kept:
            return dtype
        wanted: list[torch.dtype] = [found for name in kept if (found := getattr(torch, name)).is_floating_point]
        return min(max(wanted or [self.dtype], key=lambda each: each.itemsize), dtype, key=lambda each: each.itemsize)

    def learn(self, kept: Mapping[str, str], blocks: Mapping[str, tuple[int, int]]) -> bool:
        """Takes in what the engine keeps; returns whether anything that was asked for travels otherwise now."""
        before = {names: self.of_parameter(names, dtype) for names, dtype in list(self._asked.items())}
        more = not blocks.keys() <= self.blocks.keys()
        self.blocks |= blocks
        self.kept |= kept
        return more or any(self.of_parameter(names, self._asked[names]) != wire for names, wire in before.items())


def wire_policy(rollout_dtype: str) -> WirePolicy:
    """The policy of a trainer at first. Raises ValueError for a name of no dtype of torch's."""
    dtype = getattr(torch, rollout_dtype, None)
    if not isinstance(dtype, torch.dtype):
        key = "actor_rollout_ref.rollout.dtype"
        raise ValueError(f"{key}={rollout_dtype!r}: not a torch dtype. Set {key}=bfloat16.")
    return WirePolicy(dtype)


def trainer_device() -> torch.device:
    """The device on which this process of verl computes."""
    name = get_device_name()
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


# ---- the weight stream

WeightStream = Iterable[tuple[str, torch.Tensor]]

# verl builds engine and rollout adapter in one worker process but gives the rollout config only to the adapter, which
# therefore says here what it was configured to do
_exports_shards = False


def export_shards(enabled: bool) -> None:
    """Sets whether the plugin's rollout adapter takes this process's weight stream."""
    global _exports_shards
    _exports_shards = enabled


class ShardStream:
    """The weight stream of the plugin's engines. The sharding manager takes the engine from it, whose ``trainer`` is
    verl's strategy; anyone else, such as a checkpoint engine of a disaggregated run, iterates verl's own stream."""

    def __init__(self, engine: Any, stock: Callable[[], WeightStream]) -> None:
        self.engine = engine
        self._stock = stock

    @property
    def trainer(self) -> str:
        return str(self.engine.engine_config.strategy)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._stock())


class ShardExport:
    """The weight export of both training engines; comes before verl's class among the bases."""

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any] | None]:
        """verl's contract: ``(weight stream, adapter config or None)``. Moves nothing when the plugin is on: offloaded
        parameters stay in host memory and are read there."""
        stock: Any = super().get_per_tensor_param  # type: ignore[misc]
        if not _exports_shards:
            return stock(*args, **kwargs)
        return ShardStream(self, lambda: stock(*args, **kwargs)[0]), None


def refuse_other_engines() -> None:
    """Raises RegistryConflictError where verl's registry holds somebody else's engine for one of our strategies."""
    from verl.workers.engine.base import EngineRegistry

    for strategy in TRAINERS:
        with suppress(AssertionError, ValueError):  # not installed, or not for this device
            engine: type = EngineRegistry.get_engine_cls("language_model", strategy)
            if not issubclass(engine, ShardExport):
                raise RegistryConflictError(
                    f"verl's training engine for {strategy} is {engine.__module__}.{engine.__qualname__} here, not "
                    "verl-sync-plugin's. Uninstall the plugin that has taken the key; if it is verl's own, the GPUs "
                    f"being NVIDIA's, set VERL_ENGINE_VENDOR={VENDOR} in the environment of every node; or {TURN_OFF}."
                )


def refuse_plain_stream() -> NoReturn:
    """Raises RegistryConflictError: verl's registry gave this process an engine that is not the plugin's."""
    raise RegistryConflictError(
        "the training engine exports a plain weight stream, so it is not verl-sync-plugin's. Either another plugin has "
        "taken its key in verl's registry (verl-sync doctor names it): uninstall one of the two. Or VERL_ENGINE_VENDOR "
        f"is not {VENDOR}: set it to {VENDOR} in the environment of every node. Or "
        f"actor_rollout_ref.actor.strategy is none of {', '.join(TRAINERS)}: use one of these. Else {TURN_OFF}."
    )
