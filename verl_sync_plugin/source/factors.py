"""LoRA factors of the trainer: kept as shards, gathered whole for the weights that are about to be packed."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import replace

import torch
import torch.distributed as dist

from verl_sync_plugin.bucket import Plan, View
from verl_sync_plugin.copies.bucket_memory import BucketMemory
from verl_sync_plugin.lora.names import is_adapter
from verl_sync_plugin.planner import plan_buckets
from verl_sync_plugin.receiver.assembly import Assembler
from verl_sync_plugin.source.base import Shard, dtype_name
from verl_sync_plugin.source.slicing import Part, part_of
from verl_sync_plugin.transport.packing import pack_segment

_NO_LIMIT = 1 << 62


class FactorStore:
    """The adapter parameters of one sync.

    Args:
        device: where the gathered factors are put.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shards: dict[str, Shard] = {}
        self._plans: dict[tuple[str, ...], Plan] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """State-dict keys of everything kept, in the order of the model."""
        return tuple(self._shards)

    def clear(self) -> None:
        self._shards = {}

    def keep(self, name: str, shard: Shard) -> None:
        """Keeps one adapter parameter."""
        self._shards[name] = shard

    def local(self, key: str) -> Callable[[], torch.Tensor]:
        """This rank's run of a factor."""
        return self._shards[key].local

    def gather(
        self, keys: tuple[str, ...], group: dist.ProcessGroup | None
    ) -> Generator[None, None, dict[str, torch.Tensor]]:
        """Whole factors in the trainer's dtype. Collective over ``group``, with the same keys on all its ranks.

        Yields right before each collective.
        """
        if not keys:
            return {}
        shards = [self._shards[key] for key in keys]
        bases = tuple(shard.base for shard in shards)
        if keys not in self._plans or self._plans[keys].bases != bases:
            self._plans[keys] = plan_buckets(bases, _NO_LIMIT)
        assembler = Assembler()
        found: dict[str, torch.Tensor] = {}
        for bucket in self._plans[keys].buckets:
            memory = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
            rank = dist.get_rank(group) if bucket.world > 1 else 0
            pack_segment(memory, bucket, shards, rank)
            if bucket.world > 1:
                yield
                mine = memory.narrow(0, rank * bucket.stride, bucket.stride)
                dist.all_gather_into_tensor(memory, mine, group=group)
            found.update(assembler.tensors(BucketMemory([memory], bucket.stride, bucket.world), bucket.entries))
        assembler.finish()
        return found


def adapter_parts(shard: Shard, rank: int) -> tuple[tuple[str, Part], ...]:
    """The adapter parameters in a shard; FSDP1 may flatten them together with others."""
    found = []
    for member in shard.members:
        if is_adapter(member.name):
            numel = math.prod(member.shape)
            whole = View(member.name, member.shape, member.start, numel)
            part = part_of(shard.base, rank, member.name, member.start, numel, (whole,))
            dtype = shard.local().dtype  # the base's is what served weights travel in
            base = replace(part.base, dtype=dtype_name(dtype), itemsize=dtype.itemsize)
            found.append((member.name, replace(part, base=base)))
    return tuple(found)
