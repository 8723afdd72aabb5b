# SPDX-License-Identifier: Apache-2.0
"""LoRA factors of the trainer: kept as shards, gathered whole for the weights that are about to be packed.

What is gathered together travels in one collective per dtype: every rank lays its runs of all factors one after
another, each in a block as long as the longest run of it. So a factor begins at the same place of every rank's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist

from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Base, View
from verl_sync_plugin.lora.names import is_adapter
from verl_sync_plugin.trainers.base import dtype_name
from verl_sync_plugin.trainers.bounded import take_part
from verl_sync_plugin.trainers.slicing import Part, part_of

# Bytes of whole fp32 factors that are gathered at a time, if one bucket does not need more: every round costs all ranks
# an exchange over gloo and a collective
GATHER_BYTES = 64 << 20


def bases_ahead(
    bases: tuple[int, ...], ahead: Sequence[tuple[int, ...]], nbytes: Callable[[int], int], limit: int = GATHER_BYTES
) -> tuple[int, ...]:
    """The bases to prepare at once: those of a bucket, and of the next ones while all stay within ``limit``.

    Args:
        bases, ahead: see ``ParameterSource.prepare``.
        nbytes: of the whole factors of a base, in fp32; the same on every rank.
    """
    chosen = dict.fromkeys(bases)
    total = sum(map(nbytes, bases))
    for bucket in ahead:
        new = tuple(base for base in bucket if base not in chosen)
        total += sum(map(nbytes, new))
        if total > limit:
            break
        chosen.update(dict.fromkeys(new))
    return tuple(chosen)


@dataclass(frozen=True)
class _Factor:
    """One factor in a batch.

    Attributes:
        key: of the state dict.
        shape: of the whole factor.
        strides: of the whole factor, in elements; ``None`` when it is contiguous.
        lengths: elements that each rank holds.
        block: elements of the longest of these runs.
    """

    key: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    lengths: tuple[int, ...]
    block: int

    @cached_property
    def filled(self) -> bool:
        """Whether every run is as long as its block."""
        return sum(self.lengths) == self.block * len(self.lengths)

    @cached_property
    def torn(self) -> bool:
        """Whether a gap follows a run that is not the last."""
        return any(length < self.block and any(self.lengths[rank + 1 :]) for rank, length in enumerate(self.lengths))

    def whole(self, blocks: torch.Tensor) -> torch.Tensor:
        """The factor from the blocks of all ranks, 1-D, one after another; a view unless it is torn."""
        if self.torn:
            parts = zip(blocks.split(self.block), self.lengths, strict=True)
            blocks = torch.cat([part[:length] for part, length in parts])
        elif not self.filled:
            blocks = blocks[: sum(self.lengths)]
        return blocks.view(self.shape) if self.strides is None else blocks.as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class _Batch:
    """Factors that travel together: of one dtype, with the same owners."""

    world: int
    factors: tuple[_Factor, ...]

    def pack(self, runs: list[torch.Tensor], rank: int) -> torch.Tensor:
        """This rank's part of what is gathered: its runs, each filled up to the length of its block; 1-D."""
        pieces = []
        for factor, run in zip(self.factors, runs, strict=True):
            pieces.append(run)
            if gap := factor.block - factor.lengths[rank]:
                pieces.append(run.new_zeros(gap))
        return torch.cat(pieces)

    def join(self, parts: torch.Tensor) -> torch.Tensor:
        """The blocks of all ranks factor by factor, 1-D, from all parts of shape ``(world, elements of a part)``."""
        sizes = [factor.block for factor in self.factors]
        joined = parts.new_empty(parts.numel())
        places = [blocks.view(self.world, -1) for blocks in joined.split([self.world * size for size in sizes])]
        torch.split_with_sizes_copy(parts, sizes, dim=1, out=places)
        return joined

    def wholes(self, joined: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The factors by key, views of ``joined`` where they can be."""
        blocks = joined.split([self.world * factor.block for factor in self.factors])
        for factor, block in zip(self.factors, blocks, strict=True):
            yield factor.key, factor.whole(block)


class FactorStore:
    """The adapter parameters of one sync. Keeps from sync to sync how they are laid out when they are gathered.

    Args:
        device: where the gathered factors are put.
        timeout_seconds: bound on waiting for other ranks.
    """

    def __init__(self, device: torch.device, timeout_seconds: float) -> None:
        self._device = device
        self._timeout = timeout_seconds
        self._shards: dict[str, Shard] = {}
        self._batches: dict[tuple[str, ...], tuple[tuple[Base, ...], list[_Batch]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """State-dict keys of everything kept, in the order of the model."""
        return tuple(self._shards)

    def clear(self) -> None:
        self._shards = {}

    def keep(self, name: str, shard: Shard) -> None:
        """Keeps one adapter parameter."""
        self._shards[name] = shard

    def shard(self, key: str) -> Shard:
        """What was kept of an adapter parameter."""
        return self._shards[key]

    def local(self, key: str) -> Callable[[], torch.Tensor]:
        """This rank's run of a factor."""
        return self._shards[key].local

    def nbytes(self, keys: tuple[str, ...], itemsize: int) -> int:
        """Bytes of the whole factors at ``itemsize`` bytes per element; the same on all ranks."""
        return sum(self._shards[key].base.numel for key in keys) * itemsize

    def gather(
        self, keys: tuple[str, ...], group: dist.ProcessGroup | None, dtype: torch.dtype | None = None
    ) -> Generator[None, None, dict[str, torch.Tensor]]:
        """Whole factors. Collective over ``group``, with the same keys on all its ranks.

        Yields right before each collective. Peak device memory: the factors twice in the trainer's dtype and this
        rank's part of them; or, where they are cast, once in each dtype.

        Args:
            keys: which.
            group: their owners.
            dtype: of what is returned; ``None`` for the trainer's.
        """
        found: dict[str, torch.Tensor] = {}
        for batch in self._laid_out(keys):
            joined = yield from self._join(batch, group)
            found.update(batch.wholes(joined.to(dtype or joined.dtype)))
        return found

    def _join(self, batch: _Batch, group: dist.ProcessGroup | None) -> Generator[None, None, torch.Tensor]:
        rank = dist.get_rank(group) if batch.world > 1 else 0
        mine = batch.pack([self._shards[factor.key].local() for factor in batch.factors], rank).to(self._device)
        if batch.world == 1:
            return mine
        parts = mine.new_empty((batch.world, mine.numel()))
        yield
        work = dist.all_gather_into_tensor(parts.view(-1), mine, group=group, async_op=True)
        take_part(work, self._device, self._timeout)
        return batch.join(parts)

    def _laid_out(self, keys: tuple[str, ...]) -> list[_Batch]:
        bases = tuple(self._shards[key].base for key in keys)
        known = self._batches.get(keys)
        if known is None or known[0] != bases:
            together: dict[tuple[int, str], list[_Factor]] = {}
            for key, base in zip(keys, bases, strict=True):
                factor = _Factor(key, base.views[0].shape, base.views[0].strides, base.lengths, max(base.lengths))
                together.setdefault((len(base.lengths), base.dtype), []).append(factor)
            batches = [_Batch(world, tuple(factors)) for (world, _), factors in together.items()]
            known = self._batches[keys] = bases, batches
        return known[1]


def adapter_parts(shard: Shard, rank: int) -> tuple[tuple[str, Part], ...]:
    """The adapter parameters in a shard; FSDP1 may flatten them together with others."""
    found = []
    for member in shard.members:
        if is_adapter(member.name):
            numel = math.prod(member.shape)
            whole = View(member.name, member.shape, member.start, numel, member.strides)
            if numel == shard.base.numel:
                part = Part(replace(shard.base, key=member.name, views=(whole,)))
            else:
                part = part_of(shard.base, rank, member.name, member.start, numel, (whole,))
            dtype = shard.local().dtype  # the base's is what served weights travel in
            base = replace(part.base, dtype=dtype_name(dtype), itemsize=dtype.itemsize)
            if base == shard.base:
                base = shard.base  # then the shard itself will do
            found.append((member.name, replace(part, base=base)))
    return tuple(found)
