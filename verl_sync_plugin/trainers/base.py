# SPDX-License-Identifier: Apache-2.0
"""The contract of a parameter source, and the dtypes in which parameters travel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from verl.utils.device import get_device_name

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.strided import Run, compose
from verl_sync_plugin.layout.tensors import Base, Bucket, Plan, Shard, layers_of
from verl_sync_plugin.lora.peft import is_adapter
from verl_sync_plugin.transport.agreement import Agreement

_NAMES = {"auto": "bfloat16", "half": "float16", "float": "float32"}


class ParameterSource(ABC):
    """Everything one trainer rank contributes to a sync. Lives as long as the trainer's model and keeps what it learned
    of the layout, so that a later sync only looks up where the shards are now (offloading moves them).

    Attributes:
        makes_all: nothing of what travels is there before it is prepared, nor afterwards.
        group: the ranks among which bases with several owners are sharded; ``None`` when there are none.
    """

    makes_all: ClassVar[bool] = False
    group: dist.ProcessGroup | None = None

    @property
    def prepares(self) -> bool:
        """True if ``prepare`` makes something of what travels."""
        return type(self).prepare is not ParameterSource.prepare

    def agree_on_layout(self, agreement: Agreement) -> ParameterSource:
        """Collective, before ``shards``: the ranks tell each other who holds what, where they hold different parts.
        Returns the source that reads this trainer, mostly this one; raises SyncError with one text on every rank."""
        return self

    @abstractmethod
    def shards(self) -> list[Shard]:
        """All bases in model order, the same on every rank. Raises ValueError, with its name, for a parameter of an
        unknown layout."""

    def plan(self, bases: tuple[Base, ...], bucket_bytes: int, sharded: bool = False) -> Plan:
        """Cuts the bases into buckets; the same on every rank of the group."""
        return plan_buckets(bases, bucket_bytes, sharded)

    def prepare(self, bases: tuple[int, ...], ahead: Sequence[tuple[int, ...]] = ()) -> Generator[None, None, None]:
        """Collective over ``group``, where ``prepares``: makes what the shards of one bucket's ``bases`` need from
        other ranks; what earlier calls prepared may be gone when this returns. Yields right before each collective,
        where all ranks settle (``Agreement.run``). Of the buckets ``ahead``, in order, some may be prepared as well, to
        save rounds; every rank decides alike which. ``shards`` and ``release`` drop them."""
        yield from ()  # most sources need nothing

    def release(self) -> None:  # noqa: B027  (most sources hold nothing)
        """Drops every reference to the trainer's parameters, so that an offloaded model is not kept in memory;
        ``shards`` finds them again. Where offloading keeps the parameters and takes their memory away (Megatron), they
        may be kept."""

    def merged_with(self, bases: tuple[int, ...]) -> list[tuple[str, Callable[[], torch.Tensor]]]:
        """Names and this rank's part of what is merged into these bases; for messages."""
        return []


class ServedAdapter(ABC):
    """A LoRA adapter that the engine serves itself (``lora.merge=False``), on one trainer rank; ``settings`` are fields
    of PEFT's ``LoraConfig``."""

    settings: Mapping[str, Any]

    @abstractmethod
    def look(self) -> None:
        """Finds the adapter's parameters, once per sync; no collective. Raises ValueError, with the remedy, where they
        cannot be served."""

    @abstractmethod
    def gather(self, run: str) -> Generator[None, None, dict[str, torch.Tensor]]:
        """Whole factors by their names in an adapter checkpoint, in the trainer's dtype. Collective; yields right
        before each collective, where all ranks settle. ``run`` names this time, alike on all ranks and used once."""

    @abstractmethod
    def release(self) -> None:
        """Drops every reference to the trainer's parameters."""


class TrainerBackend(ABC):
    """Opens the sources of one of verl's training engines, on one rank, whose ``device`` computes. ``rollout_dtype`` is
    ``rollout.dtype``; ``serves_adapter``: the engine serves the trainer's LoRA adapter itself, else it
    gets merged weights."""

    serves_adapter: bool = False

    def __init__(self, engine: Any, config: SyncConfig, device: torch.device, rollout_dtype: str) -> None:
        self.engine = engine
        self.config = config
        self.device = device
        self.rollout_dtype = rollout_dtype

    @abstractmethod
    def open_source(self) -> ParameterSource:
        """Opens the parameter source at the first sync, and again if the engine asks for other dtypes. Raises
        ValueError, with key, value and remedy, for an engine that cannot be synced."""

    def open_adapter(self, source: ParameterSource) -> ServedAdapter:
        """Opens the adapter to serve, once, where ``serves_adapter``; ``source`` is what ``open_source`` returned."""
        raise TypeError(f"{type(self).__qualname__} has no adapter to serve")

    @property
    def layers(self) -> int:
        """Decoder layers of the model; 0 when that is unknown."""
        return layers_of(getattr(getattr(self.engine, "model_config", None), "hf_config", None))

    @cached_property
    def policy(self) -> WirePolicy:
        return wire_policy(self.rollout_dtype)

    @property
    def name(self) -> str:
        """Of the kind of trainer, for reports."""
        return type(self).__name__.removesuffix("Trainer")

    @property
    def model(self) -> str:
        """Name of the model's folder, else of its classes, for reports."""
        path = getattr(getattr(self.engine, "model_config", None), "path", "")
        return PurePath(path).name or ", ".join(self.architectures)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the model's classes, as its config has them."""
        config = getattr(getattr(self.engine, "model_config", None), "hf_config", None)
        return tuple(getattr(config, "architectures", None) or ())

    def untied_end(self) -> str:
        """The adapted layer class on one side of the model (embedding or head) that makes the two sides differ; empty
        when there is none."""
        return ""


@dataclass
class WirePolicy:
    """The dtypes in which a trainer's parameters travel: the widest that an engine rank keeps, never wider than the
    trainer's. One object for all its sources. ``dtype`` is that of floating-point parameters of which the engine has
    not said anything; ``kept`` is what it said, by HF name, empty for a tensor of which it wants whatever the trainer
    has."""

    dtype: torch.dtype
    kept: dict[str, str] = field(default_factory=dict)
    _asked: dict[tuple[str, ...], torch.dtype] = field(default_factory=dict)

    def of_parameter(self, names: Sequence[str], dtype: torch.dtype) -> torch.dtype:
        """The wire dtype of one storage, given the trainer's dtype and all names of it and of what it holds. Adapters
        are exchanged among trainers only and keep theirs."""
        self._asked[tuple(names)] = dtype
        served = [name for name in names if not is_adapter(name)]
        if not served or not dtype.is_floating_point:
            return dtype
        kept = {self.kept[name] for name in served if name in self.kept}
        if "" in kept:
            return dtype
        wanted: list[torch.dtype] = [found for name in kept if (found := getattr(torch, name)).is_floating_point]
        return min(max(wanted or [self.dtype], key=lambda each: each.itemsize), dtype, key=lambda each: each.itemsize)

    def learn(self, kept: Mapping[str, str]) -> bool:
        """Takes in what the engine keeps; returns whether anything that was asked for travels otherwise now."""
        before = {names: self.of_parameter(names, dtype) for names, dtype in list(self._asked.items())}
        self.kept |= kept
        return any(self.of_parameter(names, self._asked[names]) != wire for names, wire in before.items())


def wire_policy(rollout_dtype: str) -> WirePolicy:
    """The policy of a trainer at first. ``rollout_dtype`` is ``rollout.dtype``, in which engines keep most parameters;
    ``auto`` is that of the checkpoint. Raises ValueError for a name of no dtype of torch's."""
    dtype = getattr(torch, _NAMES.get(rollout_dtype, rollout_dtype), None)
    if not isinstance(dtype, torch.dtype):
        key = "actor_rollout_ref.rollout.dtype"
        raise ValueError(f"{key}={rollout_dtype!r}: not a torch dtype. Set {key}=bfloat16.")
    return WirePolicy(dtype)


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This rank's place among the owners of a sharded base; 0 where there are no others."""
    return 0 if group is None else dist.get_rank(group)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def trainer_device() -> torch.device:
    """The device on which this process of verl computes."""
    name = get_device_name()
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def name_culprit(bucket: Bucket, shards: list[Shard], source: ParameterSource, rank: int) -> str | None:
    """A sentence that names the parameter that made a packed bucket NaN or Inf, found in the trainer's own values;
    ``None``: none there. ``shards`` are all of this rank, whose place among the owners of a sharded base is ``rank``.
    """
    merged = []
    for part in bucket.slices:
        shard = shards[part.base]
        try:
            run = shard.local()[part.begin : part.end]
        except KeyError:  # a stream's tensors are gone by now
            names = [view.name for each in bucket.slices for view in shards[each.base].base.views]
            return f"one of {names[:5]} holds NaN or Inf in the trainer"
        if not run.numel() or not run.is_floating_point():
            continue
        first = sum(shard.base.lengths[: rank if len(shard.base.lengths) > 1 else 0]) + part.begin
        if (where := _first(~run.isfinite())) is not None:
            return f"{_name(shard.base, first + where)!r} holds NaN or Inf in the trainer"
        wire = shard.base.dtype
        if (where := _first(~run.to(getattr(torch, wire)).isfinite())) is not None:
            return f"{_name(shard.base, first + where)!r} exceeds the range of {wire}, in which it travels"
        if shard.merge is not None:
            merged.append(part.base)
    if not merged:
        return None
    for suspect, values in source.merged_with(tuple(merged)):
        if not bool(values().isfinite().all()):
            return f"{suspect!r} holds NaN or Inf in the trainer"
    names = [view.name for base in merged for view in shards[base].base.views]
    return f"one of {names[:5]} is NaN or Inf once its adapter is merged"


def _first(flags: torch.Tensor) -> int | None:
    return int(flags.int().argmax()) if bool(flags.any()) else None


def _name(base: Base, element: int) -> str:
    here = Run(element, element, 1)
    held = (view.name for view in base.views if any(compose(here, run) for run in view.runs))
    return next(held, base.key)
