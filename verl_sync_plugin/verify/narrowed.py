# SPDX-License-Identifier: Apache-2.0
"""The hash of tensors as an engine keeps them that are sent in a wider dtype, such as routers.

They travel in fp32 and are rounded by the engine, so the hash of what was packed says nothing of what the engine keeps.
The trainer rounds them once more, and hashes that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from verl_sync_plugin.copies.blocks import Block
from verl_sync_plugin.copies.hulls import numbers_of
from verl_sync_plugin.copies.plain import hash_block
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Bucket, Entry, Plan, Slice

NARROW_BYTES = 2  # no engine keeps what is sent in 16 bits in less


def narrowed_sums(plan: Plan, rank: int, shards: Sequence[Shard], dtypes: Mapping[int, str]) -> torch.Tensor:
    """Hashes of this rank's parts of some tensors, rounded: int64 of shape ``(tensors,)``, zero for all others.

    Args:
        plan: all buckets.
        rank: this rank's place among the owners of a sharded base.
        shards: all shards of this rank, by base index.
        dtypes: of the engine, by tensor number. The place of a byte is counted in elements of this dtype.
    """
    numbers = numbers_of(bucket.entries for bucket in plan.buckets)
    sums = torch.zeros(len(numbers), dtype=torch.int64)
    for bucket in plan.buckets:
        for entry in bucket.entries:
            if (name := dtypes.get(numbers[entry.name])) is not None:
                for part, block in _parts(bucket, entry, rank, shards, getattr(torch, name)):
                    sums[numbers[entry.name]] += hash_block(part, 0, block).cpu()
    return sums


def made_on_the_way(plan: Plan, rank: int, shards: Sequence[Shard], all_of_them: bool) -> frozenset[int]:
    """Numbers of the tensors that this rank cannot round once more, since what it packed of them is not there any more:
    of a merged adapter, say. Only of those that an engine may keep in a narrower dtype.

    Args:
        plan, rank, shards: as above.
        all_of_them: see ``ParameterSource.makes_all``.
    """
    numbers = numbers_of(bucket.entries for bucket in plan.buckets)
    return frozenset(
        numbers[entry.name]
        for bucket in plan.buckets
        for entry in bucket.entries
        if shards and getattr(torch, entry.dtype).itemsize > NARROW_BYTES
        if all_of_them or any(shards[held.base].merge is not None for _, held in _held(bucket, entry, rank))
    )


def _held(bucket: Bucket, entry: Entry, rank: int) -> Iterator[tuple[Run, Slice]]:
    """The pieces of a tensor that this rank packs into a bucket, and the slice that each lies in."""
    origin = rank * bucket.stride if bucket.world > 1 else 0
    for piece in (piece for piece in entry.pieces if origin <= piece.source < origin + bucket.stride):
        yield piece, max((s for s in bucket.slices if s.offset <= piece.source - origin), key=lambda s: s.offset)


def _parts(
    bucket: Bucket, entry: Entry, rank: int, shards: Sequence[Shard], kept: torch.dtype
) -> Iterator[tuple[torch.Tensor, Block]]:
    """What this rank packs of a tensor into a bucket, rounded: uint8 of shape ``(n,)``, and its places."""
    wire = getattr(torch, entry.dtype)
    ratio = wire.itemsize // kept.itemsize
    origin = rank * bucket.stride if bucket.world > 1 else 0
    for piece, held in _held(bucket, entry, rank):
        first = held.begin + (piece.source - origin - held.offset) // wire.itemsize
        span = ((piece.count - 1) * piece.source_stride + piece.width) // wire.itemsize
        part = shards[held.base].local()[first : first + span].detach().to(wire).to(kept)
        at = piece.narrowed(ratio)
        yield (
            part.contiguous().view(torch.uint8),
            Block(0, 0, at.source, at.width, at.count, at.source_stride, 0, at.source_stride),
        )
