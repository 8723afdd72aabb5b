"""The contract of a parameter source."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl_sync_plugin.bucket import Base, Plan
from verl_sync_plugin.lora.names import is_adapter
from verl_sync_plugin.planner import plan_buckets


@dataclass(frozen=True)
class WirePolicy:
    """Which dtype a parameter travels in.

    Attributes:
        dtype: for floating-point parameters.
        keep: patterns of HF names whose parameters keep the trainer's dtype (routers and the like).
    """

    dtype: torch.dtype
    keep: tuple[str, ...] = ()

    def of_parameter(self, names: list[str], dtype: torch.dtype) -> torch.dtype:
        """Of one storage with all its names. Adapters are exchanged among trainers only and keep their dtype."""
        served = [name for name in names if not is_adapter(name)]
        if not served or not dtype.is_floating_point:
            return dtype
        return dtype if any(re.search(p, name) for p in self.keep for name in served) else self.dtype


@dataclass(frozen=True)
class Member:
    """One parameter inside a base, as the trainer knows it: before verl's rewriting into HF tensors.

    Attributes:
        name: of the trainer's state dict.
        shape: of the whole parameter.
        start: its first element in the base.
        strides: in elements; ``None`` when its elements lie in the order of their indices.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...] | None = None


@dataclass(
    slots=True, eq=False
)  # not frozen: thousands are made in every sync, and that would take three times as long
class Shard:
    """One base with access to this rank's run of it. Never changed.

    Attributes:
        base: what the planner needs, equal on all ranks of the group.
        local: returns this rank's run, 1-D, in the trainer's dtype and on the trainer's device (host memory when
            parameters are offloaded). It aliases the live parameter: read it, never write it.
        merge: turns a part of the run, on the device, into what travels: ``merge(part, begin)`` with ``part`` the
            elements from ``begin`` on. Returns a tensor that the next call overwrites. ``None`` when the run travels
            as it is.
        members: the parameters in the base; tied ones under all their names. Buffers have none.
        run: what ``local`` would return, perhaps in another shape, for callers that only need to know where it is:
            with thousands of shards a flattened view of each costs more than moving them. ``None``: ask ``local``.
    """

    base: Base
    local: Callable[[], torch.Tensor]
    merge: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    members: tuple[Member, ...] = ()
    run: torch.Tensor | None = None


class ParameterSource(ABC):
    """Everything one trainer rank contributes to a sync.

    Lives as long as the trainer's model and keeps what it learned of the layout, so that a later sync only looks up
    where the shards are now (offloading moves them).
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks among which bases with several owners are sharded; ``None`` when there are none."""
        return self._group

    @abstractmethod
    def shards(self) -> list[Shard]:
        """All bases in model order, the same on every rank.

        Raises:
            ValueError: a parameter is laid out in a way this source does not know; the text names it.
        """

    def plan(self, bases: tuple[Base, ...], bucket_bytes: int, sharded: bool = False) -> Plan:
        """Cuts the bases into buckets; the same on every rank of the group."""
        return plan_buckets(bases, bucket_bytes, sharded)

    def prepare(self, bases: tuple[int, ...], ahead: Sequence[tuple[int, ...]] = ()) -> Generator[None, None, None]:
        """Collective over ``group``: whatever the shards with these indices need from other ranks before packing.

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


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This rank's place among the owners of a sharded base; 0 where there are no others."""
    return 0 if group is None else dist.get_rank(group)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
