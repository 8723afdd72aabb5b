"""A copy plan compiled for the buckets of one sync: run, hashed, and compared with the model's own load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from verl_sync_plugin.copies.copier import Copier
from verl_sync_plugin.copies.plain import runs
from verl_sync_plugin.receiver.copy_plan import CopyPlan
from verl_sync_plugin.receiver.cuts import Cast, Work, cut
from verl_sync_plugin.transport.protocol import Manifest


class WireSums:
    """One hash per segment of every bucket, added up as the bytes are read. int64 on the slots' device."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self.first = [0]
        for world in manifest.worlds:
            self.first.append(self.first[-1] + world)
        self.sums = torch.zeros(self.first[-1], dtype=torch.int64, device=device)

    def check(self, sent: tuple[tuple[int, ...], ...]) -> None:
        """Compares with what the senders hashed while they packed.

        Raises:
            ValueError: a bucket arrived with other bytes; names bucket and segment.
        """
        received = self.sums.tolist()
        for bucket, expected in enumerate(sent):
            for segment, value in enumerate(expected):
                found = received[self.first[bucket] + segment]
                if found != value:
                    raise ValueError(
                        f"bucket {bucket}: the bytes of trainer rank {segment} of its group changed on the way to the "
                        f"engine (hash sent {value:#x}, received {found:#x}). The memory between trainer and engine is "
                        "not reliable, or something overwrote a bucket in use"
                    )


class Replay:
    """The plan of one layout and one manifest. Device memory: the tables (see ``KernelTable``)."""

    def __init__(self, plan: CopyPlan, manifest: Manifest, wire: WireSums, copier: Copier) -> None:
        self._plan = plan
        self._copier = copier
        self.works = [
            cut(entries, segment, first, plan.planned)
            for entries, segment, first in zip(manifest.buckets, manifest.segments, wire.first, strict=False)
        ]
        self._ready = [
            (copier.prepare(work.fused), copier.prepare(work.bare), copier.prepare(work.reads)) for work in self.works
        ]
        leftovers = {entry.name for work in self.works for entry in work.leftovers}
        self.leftovers = frozenset(leftovers)
        nbytes = {entry.name: entry.nbytes for entries in manifest.buckets for entry in entries}
        self.tensors = len(nbytes) - len(leftovers)
        self.nbytes = sum(size for name, size in nbytes.items() if name not in leftovers)

    def fill(self) -> None:
        """Writes the constants again: released memory comes back with anything in it."""
        for target, value in self._plan.fills:
            target.fill_(value)

    def run(self, index: int, memory: torch.Tensor, sums: torch.Tensor, hashed: bool) -> None:
        """Starts the copies of one bucket on the current stream."""
        fused, bare, reads = self._ready[index]
        fused.run(memory, sums, hashed=hashed)
        bare.run(memory, sums, hashed=False)
        for _, cast in self.works[index].casts:
            target = self._typed_target(cast)
            target.copy_(self._typed_source(cast, memory))
        if hashed:
            reads.run(memory, sums, copy=False)

    def read(self, index: int, memory: torch.Tensor, sums: torch.Tensor) -> None:
        """Hashes a bucket without loading it."""
        fused, _, reads = self._ready[index]
        fused.run(memory, sums, copy=False)
        reads.run(memory, sums, copy=False)

    def _typed_source(self, cast: Cast, memory: torch.Tensor) -> torch.Tensor:
        block = cast.block
        return runs(memory, block.source, block.width, block.lines, block.source_stride).view(cast.planned.dtype)

    def _typed_target(self, cast: Cast) -> torch.Tensor:
        block, planned = cast.block, cast.planned
        flat, start = self._copier.targets.find(block.target)
        width = block.width * planned.target_dtype.itemsize // planned.dtype.itemsize
        return runs(flat, start, width, block.lines, block.target_stride).view(planned.target_dtype)


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

    def note(self, index: int, memory: torch.Tensor) -> None:
        """Takes in a bucket before the model loads it; the slot may be reused afterwards."""
        self._copier.prepare(self._blocks[index]).run(memory, self._sent, copy=False)
        for name, cast in self.works_of(index).casts:
            # Routers and the like: few and small, so kept whole
            expected = self._replay._typed_source(cast, memory).to(cast.planned.target_dtype)
            self._casts.append((name, cast, expected))

    def works_of(self, index: int) -> Work:
        return self._replay.works[index]

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
