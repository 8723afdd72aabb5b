# SPDX-License-Identifier: Apache-2.0
"""The contract of a parameter source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from verl.utils.device import get_device_name

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.names import layers_of
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Base, Plan
from verl_sync_plugin.trainers.wire import WirePolicy, wire_policy
from verl_sync_plugin.transport.agreement import Agreement


class ParameterSource(ABC):
    """Everything one trainer rank contributes to a sync.

    Lives as long as the trainer's model and keeps what it learned of the layout, so that a later sync only looks up
    where the shards are now (offloading moves them).

    Attributes:
        prepares: something of what travels is made on the way: the class has a ``prepare`` of its own.
        makes_all: nothing of what travels is there before it is prepared, nor behind it.
    """

    prepares: ClassVar[bool] = False
    makes_all: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.prepares = cls.prepares or "prepare" in vars(cls)

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks among which bases with several owners are sharded; ``None`` when there are none."""
        return self._group

    def agree_on_layout(self, agreement: Agreement) -> ParameterSource:
        """Collective, before ``shards``: the ranks tell each other who holds what, where they hold different parts.

        Returns:
            The source that reads this trainer: mostly this one.

        Raises:
            SyncError: any rank failed; the same text on every rank.
        """
        return self

    @abstractmethod
    def shards(self) -> list[Shard]:
        """All bases in model order, the same on every rank.

        Raises:
            ValueError: a parameter is laid out in a way this source does not know; the text names it.
        """

    def plan(self, bases: tuple[Base, ...], bucket_bytes: int, sharded: bool = False, held: int = 1) -> Plan:
        """Cuts the bases into buckets; the same on every rank of the group."""
        return plan_buckets(bases, bucket_bytes, sharded, held)

    def prepare(self, bases: tuple[int, ...], ahead: Sequence[tuple[int, ...]] = ()) -> Generator[None, None, None]:
        """Collective over ``group``, where ``prepares``: what these shards need from other ranks before packing.

        Yields right before each collective, where all ranks settle (``Agreement.run``): what comes before may fail.

        Args:
            bases: of one bucket; what earlier calls prepared may be gone when this returns.
            ahead: those of the buckets behind it, in order. Some may be prepared as well, to save rounds: their calls
                then have nothing to do. Which ones, every rank decides alike. ``shards`` and ``release`` drop them.
        """
        yield from ()  # most sources need nothing

    def release(self) -> None:  # noqa: B027  (most sources hold nothing)
        """Drops every reference to the trainer's parameters; ``shards`` finds them again.

        A source that kept one would keep an offloaded model in memory after the trainer has moved it elsewhere. Where
        offloading keeps the parameters and takes their memory away (Megatron), they may be kept.
        """

    def merged_with(self, bases: tuple[int, ...]) -> list[tuple[str, Callable[[], torch.Tensor]]]:
        """Names and this rank's part of what is merged into these bases; for messages."""
        return []


class ServedAdapter(ABC):
    """A LoRA adapter that the engine serves itself (``lora.merge=False``), on one trainer rank.

    Attributes:
        settings: fields of PEFT's ``LoraConfig``.
    """

    settings: Mapping[str, Any]

    @abstractmethod
    def look(self) -> None:
        """Finds the adapter's parameters, once per sync; no collective.

        Raises:
            ValueError: they cannot be served; names what and the remedy.
        """

    @abstractmethod
    def gather(self, run: str) -> Generator[None, None, dict[str, torch.Tensor]]:
        """Whole factors by their names in an adapter checkpoint, in the trainer's dtype. Collective; yields right
        before each collective, where all ranks settle.

        Args:
            run: a name for this time, the same on all ranks and used once.
        """

    @abstractmethod
    def release(self) -> None:
        """Drops every reference to the trainer's parameters."""


class TrainerBackend(ABC):
    """What one of verl's training engines brings to its syncs, on one rank.

    Args:
        engine: verl's training engine.
        config: the sync's settings.
        device: where the trainer computes.
        rollout_dtype: ``rollout.dtype``.

    Attributes:
        serves_adapter: the engine serves the trainer's LoRA adapter itself; else it gets merged weights.
    """

    serves_adapter: bool = False

    def __init__(self, engine: Any, config: SyncConfig, device: torch.device, rollout_dtype: str) -> None:
        self.engine = engine
        self.config = config
        self.device = device
        self.rollout_dtype = rollout_dtype

    @abstractmethod
    def open_source(self) -> ParameterSource:
        """The parameter source of the engine; called at the first sync, and again if the engine asks for other dtypes.

        Raises:
            ValueError: the engine is configured in a way that cannot be synced; names key, value and remedy.
        """

    def open_adapter(self, source: ParameterSource) -> ServedAdapter:
        """The adapter to serve, where ``serves_adapter``; called once.

        Args:
            source: what ``open_source`` returned.
        """
        raise TypeError(f"{type(self).__qualname__} has no adapter to serve")

    @property
    def layers(self) -> int:
        """How many decoder layers the model has; 0 when that is unknown."""
        return layers_of(getattr(getattr(self.engine, "model_config", None), "hf_config", None))

    @cached_property
    def policy(self) -> WirePolicy:
        """In which dtypes parameters travel."""
        return wire_policy(self.rollout_dtype)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the model's classes, as its config has them."""
        return tuple(getattr(self.engine.model_config.hf_config, "architectures", None) or ())

    def untied_end(self) -> str:
        """The adapted layer class on one side of the model (embedding or head) that makes the two sides differ; empty
        when there is none."""
        return ""


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This rank's place among the owners of a sharded base; 0 where there are no others."""
    return 0 if group is None else dist.get_rank(group)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def trainer_device() -> torch.device:
    """Where this process of verl computes."""
    name = get_device_name()
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)
