# SPDX-License-Identifier: Apache-2.0
"""Puts tensors together from the pieces a bucket holds."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from verl_sync_plugin.copies.bucket_memory import BucketMemory
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Entry
from verl_sync_plugin.receiver.engine_model import FusedPairs, partner_of

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Assembler:
    """Turns the entries of successive buckets into whole tensors.

    Peak memory beyond the staging slots: one tensor (its pieces joined) at a time, plus every tensor that is split
    over buckets and not yet complete, plus one half of a fused pair.
    """

    def __init__(self, names: frozenset[str] | None = None, pairs: FusedPairs = ()) -> None:
        """``names``: all tensors of the sync; half of a fused pair waits only for a partner among them.

        ``pairs``: ``EngineModel.fused_pairs``.
        """
        self._names = names
        self._pairs = pairs
        self._partial: dict[str, torch.Tensor] = {}
        self._arrived: dict[str, int] = {}
        self._waiting: dict[str, tuple[str, torch.Tensor]] = {}

    def tensors(self, memory: BucketMemory, entries: tuple[Entry, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are complete with this bucket; they may alias ``memory`` unless that is shared.

        Args:
            memory: the bucket.
            entries: what it holds.
        """
        for entry in entries:
            flat = self._join(memory, entry)
            if flat is None:
                continue
            typed = flat.view(getattr(torch, entry.dtype))
            if entry.strides is None:
                tensor = typed.view(entry.shape)
            else:
                tensor = typed.as_strided(entry.shape, entry.strides)
            yield from self._release(entry.name, tensor)

    def _join(self, memory: BucketMemory, entry: Entry) -> torch.Tensor | None:
        here = sum(piece.width * piece.count for piece in entry.pieces)
        if here == entry.nbytes and all(piece.count == 1 for piece in entry.pieces):
            parts = [memory.narrow(piece.source, piece.width) for piece in entry.pieces]
            # A copy where others read: some models write into what they are given
            return parts[0] if len(parts) == 1 and not memory.shared else torch.cat(parts)
        partial = self._partial.get(entry.name)
        if partial is None:
            partial = self._partial[entry.name] = torch.empty(entry.nbytes, dtype=torch.uint8, device=memory.device)
            self._arrived[entry.name] = 0
        for piece in entry.pieces:
            _place(partial, memory, piece)
        self._arrived[entry.name] += here
        if self._arrived[entry.name] < entry.nbytes:
            return None
        del self._arrived[entry.name]
        return self._partial.pop(entry.name)

    def _release(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        partner = partner_of(name, self._pairs)
        if partner is None or (self._names is not None and partner not in self._names):
            yield name, tensor  # without q_lora_rank there is nothing to fuse with
        elif partner in self._waiting:
            yield self._waiting.pop(partner)
            yield name, tensor
        else:
            # A copy: the slot is reused before the partner arrives
            self._waiting[name] = (name, tensor.clone())

    def finish(self) -> None:
        """Checks that nothing is left over.

        Raises:
            ValueError: a tensor or a fused pair is incomplete.
        """
        if self._partial or self._waiting:
            left = sorted([*self._partial, *self._waiting])
            raise ValueError(f"the sync ended with incomplete tensors: {', '.join(left[:10])}")


def _place(tensor: torch.Tensor, memory: BucketMemory, piece: Run) -> None:
    """Copies one piece, with all its repetitions, from the bucket into a tensor of uint8."""
    if piece.count == 1:
        tensor.narrow(0, piece.target, piece.width).copy_(memory.narrow(piece.source, piece.width))
        return
    slot, first = memory.at(piece.source)
    # A strided copy of single bytes is slow: use the widest element that divides everything
    numbers = (piece.width, first, piece.source_stride, piece.target, piece.target_stride)
    width = math.gcd(8, slot.data_ptr(), tensor.data_ptr(), slot.storage_offset(), *numbers)
    source = _repeated(slot, first, piece.source_stride, piece).view(_WIDTHS[width])
    _repeated(tensor, piece.target, piece.target_stride, piece).view(_WIDTHS[width]).copy_(source)


def _repeated(flat: torch.Tensor, first: int, step: int, piece: Run) -> torch.Tensor:
    return flat.as_strided((piece.count, piece.width), (step, 1), flat.storage_offset() + first)
