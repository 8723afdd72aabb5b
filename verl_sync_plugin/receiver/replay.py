# SPDX-License-Identifier: Apache-2.0
"""A copy plan compiled for the buckets of one sync: run, hashed, and compared with the model's own load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from verl_sync_plugin.copies.bucket_memory import BucketMemory
from verl_sync_plugin.copies.copier import Copier
from verl_sync_plugin.copies.hulls import hulls_of, numbers_of
from verl_sync_plugin.copies.plain import runs
from verl_sync_plugin.receiver.constants import hold
from verl_sync_plugin.receiver.copy_plan import CopyPlan
from verl_sync_plugin.receiver.cuts import Cast, Work, bytes_of, cut
from verl_sync_plugin.receiver.readings import choose, readings_of
from verl_sync_plugin.transport.protocol import Manifest


class Replay:
    """The plan of one layout and one manifest. Device memory: the tables (see ``KernelTable``).

    Args:
        plan: what is copied where.
        manifest: what the buckets hold.
        copier: makes the copies.
        whole: tensors to be hashed whole, whatever is copied of them.
    """

    def __init__(self, plan: CopyPlan, manifest: Manifest, copier: Copier, whole: frozenset[str] = frozenset()) -> None:
        self._copier = copier
        numbers = numbers_of(manifest.buckets)
        hulls = [hulls_of(entries) for entries in manifest.buckets]
        chosen = choose(hulls, plan.planned, whole)
        self.readings = readings_of(manifest.buckets, hulls, numbers, plan.planned, chosen)
        self.works = [
            cut(entries, segment, of_bucket, numbers, plan.planned, chosen)
            for entries, segment, of_bucket in zip(manifest.buckets, manifest.segments, hulls, strict=True)
        ]
        self._ready = [
            (copier.prepare(work.fused), copier.prepare(work.bare), copier.prepare(work.reads)) for work in self.works
        ]
        self._zeros = [target for target, value in plan.fills if value == 0 and target.numel()]
        self._constants = [(target, value) for target, value in plan.fills if value != 0]
        self._manifest = manifest
        self._traffic: dict[tuple[frozenset[int], bool, bool], tuple[int, int]] = {}
        leftovers = {entry.name for work in self.works for entry in work.leftovers}
        self.leftovers = frozenset(leftovers)
        nbytes = {entry.name: entry.nbytes for entries in manifest.buckets for entry in entries}
        self.tensors = len(nbytes) - len(leftovers)
        self.nbytes = sum(size for name, size in nbytes.items() if name not in leftovers)

    def fill(self) -> None:
        """Writes the constants again: released memory comes back with anything in it."""
        if self._zeros:
            torch._foreach_zero_(self._zeros)  # a padded model has thousands
        for target, value in self._constants:
            target.fill_(value)

    def run(self, index: int, memory: BucketMemory, sums: torch.Tensor, hashed: bool) -> None:
        """Starts the copies of one bucket on the current stream."""
        fused, bare, reads = self._ready[index]
        fused.run(memory, sums, hashed=hashed)
        bare.run(memory, sums, hashed=False)
        for _, cast in self.works[index].casts:
            target = self._typed_target(cast)
            target.copy_(self._typed_source(cast, memory))
        if hashed:
            reads.run(memory, sums, copy=False)

    def read(self, index: int, memory: BucketMemory, sums: torch.Tensor) -> None:
        """Hashes a bucket without loading it."""
        fused, _, reads = self._ready[index]
        fused.run(memory, sums, copy=False)
        reads.run(memory, sums, copy=False)

    def traffic(self, near: frozenset[int], beside: bool, replayed: bool) -> tuple[int, int]:
        """Bytes read on the engine rank's own device, and elsewhere.

        Args:
            near: the segments that are there.
            beside: whether buckets are there that are not shared out.
            replayed: of a sync that replays, or of one that reads everything.
        """
        key = near, beside, replayed
        if key not in self._traffic:
            own = total = 0
            for work, entries, segment, world in zip(
                self.works, self._manifest.buckets, self._manifest.segments, self._manifest.worlds, strict=True
            ):
                read = work.bytes_by_base(segment) if replayed else bytes_of(entries, segment)
                spread = self._manifest.sharded and world > 1
                own += sum(read[number] for number in near) if spread else read.total() * beside
                total += read.total()
            self._traffic[key] = own, total - own
        return self._traffic[key]

    def _typed_source(self, cast: Cast, memory: BucketMemory) -> torch.Tensor:
        block = cast.block
        slot, source = memory.at(block.source)
        return runs(slot, source, block.width, block.count, block.source_stride).view(cast.planned.dtype)

    def _typed_target(self, cast: Cast) -> torch.Tensor:
        block, planned = cast.block, cast.planned
        flat, start = self._copier.targets.find(block.target)
        width = block.width * planned.target_dtype.itemsize // planned.dtype.itemsize
        return runs(flat, start, width, block.count, block.target_stride).view(planned.target_dtype)


class Comparison:
    """Whether the model holds, after its own load, what a replay would have written; by hash, one per tensor.

    Costs one more read of every bucket and of every parameter, once per plan.
    """

    def __init__(self, replay: Replay, copier: Copier, device: torch.device) -> None:
        self._replay = replay
        self._copier = copier
        names = {name for work in replay.works for name in (*work.owners, *(name for name, _ in work.casts))}
        self._names = sorted(names)
        number = {name: index for index, name in enumerate(self._names)}
        self._blocks = [
            [replace(b, group=number[n]) for n, b in zip(work.owners, (*work.fused, *work.bare), strict=True)]
            for work in replay.works
        ]
        self._number = number
        self._sent = torch.zeros(len(names), dtype=torch.int64, device=device)
        self._differ: set[str] = set()
        self._casts: list[tuple[str, Cast, torch.Tensor]] = []

    def note(self, index: int, memory: BucketMemory) -> None:
        """Takes in a bucket before the model loads it; the slot may be reused afterwards."""
        self._copier.prepare(self._blocks[index]).run(memory, self._sent, copy=False)
        for name, cast in self.works_of(index).casts:
            # Routers and the like: few and small, so kept whole
            expected = self._replay._typed_source(cast, memory).to(cast.planned.target_dtype)
            self._casts.append((name, cast, expected))

    def works_of(self, index: int) -> Work:
        return self._replay.works[index]

    def refuse_wrong(self, plan: CopyPlan, names: Iterable[str]) -> bool:
        """Takes out of the plan what a replay would have written otherwise; returns whether there was any.

        Args:
            plan: the one that was compared.
            names: all tensors, of which none is replayed beside a constant that is none.
        """
        differing = self.differing()
        for name in differing:
            plan.refuse(name, "its replay differs from the model's own load")
        if not hold(plan.fills):
            plan.planned, plan.refused = {}, dict.fromkeys(names, "is loaded beside a constant that changes")
        return bool(differing)

    def differing(self) -> Sequence[str]:
        """Names whose bytes in the model are not those that a replay would have written. Waits for the device."""
        held = torch.zeros_like(self._sent)
        for blocks in self._blocks:
            self._copier.hash_targets(blocks, held)
        unequal = (held != self._sent).nonzero().flatten().tolist()
        differ = {self._names[index] for index in unequal}
        for name, cast, expected in self._casts:
            held_cast = self._replay._typed_target(cast)
            if not torch.equal(held_cast.view(torch.uint8), expected.view(torch.uint8)):
                differ.add(name)
        return sorted(differ)
