# SPDX-License-Identifier: Apache-2.0
"""LoRA weights merged while they are packed.

Only the small factors are gathered, whole, for the weights of a few buckets at a time. The base stays sharded and is
never written, so a failure leaves the trainer as it was. All trainers share ``Merging``; ``MergingSource`` wraps the
source of a PEFT model under FSDP.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial

import torch
import torch.distributed as dist

from verl_sync_plugin.config.settings import MODEL, TURN_OFF
from verl_sync_plugin.layout.tensors import Base, ParameterName, Shard
from verl_sync_plugin.lora.merge import Scratch, Target, steps_of, targets_of
from verl_sync_plugin.lora.peft import Adapters, Weight, is_adapter, refuse_incomplete
from verl_sync_plugin.lora.settings import TIED
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.transport.agreement import await_collective, poll_until

# Bytes of whole fp32 factors that are gathered at a time, if one bucket does not need more: every round costs all ranks
# an exchange over gloo and a collective
GATHER_BYTES = 64 << 20
TRAINED = "changes in training, but is no part of the adapter, so the engine would not get it"
Merge = Callable[[torch.Tensor, int], torch.Tensor]  # see ``Shard.merge``


def await_device(device: torch.device, seconds: float) -> None:
    """Waits until a device has done all that it was given; a dead rank leaves NCCL hanging. Raises TimeoutError."""
    if device.type != "cuda":
        return
    event = torch.cuda.Event()
    event.record()
    poll_until(event.query, seconds, f"the device did not finish what ranks exchange within {seconds:g} s")


def refuse_unserved(found: Iterable[tuple[str, str]]) -> None:
    """Raises ValueError for the first parameter, with the reason, that an engine which serves the adapter lacks."""
    for name, why in found:
        raise ValueError(f"{MODEL}.lora.merge=False: {name!r} {why}. Set {MODEL}.lora.merge=True.")


# ---- factors: kept as shards, gathered whole. What is gathered together travels in one collective per dtype: every
# rank lays its runs of all factors one after another, each in a block as long as the longest run of it. So a factor
# begins at the same place of every rank's part.


class FactorStore:
    """Gathers factors onto ``device``. ``shards`` are the adapter parameters of this sync, by state-dict key, in the
    order of the model, each the only tensor of its base."""

    def __init__(self, device: torch.device, timeout_seconds: float) -> None:
        self._device = device
        self._timeout = timeout_seconds
        self.shards: dict[str, Shard] = {}

    def gather(
        self, keys: Sequence[str], group: dist.ProcessGroup | None, dtype: torch.dtype | None = None
    ) -> Generator[None, None, dict[str, torch.Tensor]]:
        """Whole factors, in ``dtype`` or the trainer's. Collective over ``group``, their owners, with the same keys on
        all ranks; where there is one, yields once, right before the collectives. Peak device memory: the factors twice,
        and this rank's part."""
        together: dict[tuple[int, str], dict[str, Base]] = {}
        for key in keys:
            base = self.shards[key].base
            together.setdefault((len(base.lengths), base.dtype), {})[key] = base
        batches = []
        for (world, _), bases in together.items():
            mine = self._own(bases, dist.get_rank(group) if world > 1 else 0)
            # Room for all parts is made here: a rank that lacks it says so before others wait in a collective
            parts = mine.unsqueeze(0) if world == 1 else mine.new_empty((world, mine.numel()))
            batches.append((bases, mine, parts))
        if group is not None:
            yield
        for _, mine, parts in batches:
            if len(parts) > 1:
                work = dist.all_gather_into_tensor(parts.view(-1), mine, group=group, async_op=True)
                await_collective(work, self._device, self._timeout)
        found: dict[str, torch.Tensor] = {}
        for bases, _, parts in batches:
            sizes = [_block(base) for base in bases.values()]
            joined, lengths = parts.view(-1), [len(parts) * size for size in sizes]
            if len(parts) > 1:  # to the blocks of all ranks, factor by factor
                joined = torch.empty_like(joined)
                places = [blocks.view(len(parts), -1) for blocks in joined.split(lengths)]
                torch.split_with_sizes_copy(parts, sizes, dim=1, out=places)
            blocks = joined.to(dtype or joined.dtype).split(lengths)
            found.update((key, _whole(base, each)) for (key, base), each in zip(bases.items(), blocks, strict=True))
        return found

    def _own(self, bases: Mapping[str, Base], rank: int) -> torch.Tensor:
        """This rank's blocks, factor by factor, 1-D."""
        pieces = []
        for key, base in bases.items():
            pieces.append(self.shards[key].local())
            if gap := _block(base) - base.held(rank):
                pieces.append(pieces[-1].new_zeros(gap))
        return torch.cat(pieces).to(self._device)


def _block(base: Base) -> int:
    """Elements of the longest run of a factor that a rank holds."""
    return max(base.lengths)


def _whole(base: Base, blocks: torch.Tensor) -> torch.Tensor:
    """A factor from the blocks of all ranks, 1-D, one after another; a view unless there are gaps between its runs."""
    lengths, block = base.lengths, _block(base)
    if any(length < block and any(lengths[rank + 1 :]) for rank, length in enumerate(lengths)):
        blocks = torch.cat([part[:length] for part, length in zip(blocks.split(block), lengths, strict=True)])
    shape, strides = base.views[0].shape, base.views[0].strides
    whole = blocks[: base.numel]
    return whole.view(shape) if strides is None else whole.as_strided(shape, strides)


# ---- the merge


class Merging(ParameterSource):
    """A source that merges while it is packed, if it ``merges`` at all; every trainer's. ``factors`` are those of this
    sync, as shards; ``gathered`` are whole factors that are there now, by state-dict key."""

    _gather_bytes = GATHER_BYTES

    def __init__(self, device: torch.device, timeout_seconds: float, merges: bool) -> None:
        self._merges = merges
        self._scratch = Scratch(device)
        self.factors = FactorStore(device, timeout_seconds)
        self._prepared: frozenset[int] = frozenset()
        self.gathered: dict[str, torch.Tensor] = {}

    @property
    def prepares(self) -> bool:
        return self._merges

    @abstractmethod
    def factor_bytes(self, base: int) -> int:
        """Bytes of the whole factors of a base, in fp32; the same on every rank."""

    @abstractmethod
    def gather(self, bases: tuple[int, ...]) -> Generator[None, None, None]:
        """Adds whole factors for these bases, fp32, to ``gathered``. Collective; yields right before each."""

    def release(self) -> None:
        self.factors.shards.clear()
        self._scratch.release()
        self._forget()
        super().release()

    def _forget(self) -> None:
        self._prepared, self.gathered = frozenset(), {}

    def prepare(self, bases: tuple[int, ...], ahead: Sequence[tuple[int, ...]] = ()) -> Generator[None, None, None]:
        """Gathers the factors of every adapted weight in these bases; those of the next buckets as well, as long as all
        of them stay within ``GATHER_BYTES``."""
        if self._prepared.issuperset(bases):
            return
        self._forget()  # before more is taken
        together, total = set(bases), sum(map(self.factor_bytes, bases))
        for bucket in ahead:
            new = set(bucket) - together
            total += sum(map(self.factor_bytes, new))
            if total > self._gather_bytes:
                break
            together |= new
        chosen = tuple(sorted(together))
        yield from self.gather(chosen)
        self._prepared = frozenset(chosen)  # last: what a failure leaves is no preparation

    def merger(self, targets: Sequence[Target], first: int) -> Merge:
        """Returns what merges ``targets`` into parts of a run that begins at element ``first`` of the base (see
        ``Shard.merge``). How each part is merged is worked out once."""
        steps = cache(partial(steps_of, targets))

        def merge(part: torch.Tensor, begin: int) -> torch.Tensor:
            return self._scratch.merge(part, steps(first + begin, part.numel()), self.gathered)

        return merge


# ---- PEFT's models under FSDP

# A base, what is merged into it, and what merges it
Recipe = tuple[Base, tuple[Target, ...], Merge | None]


class MergingSource(Merging):
    """Wraps ``inner``, the source of a PEFT model, whose adapted weights are named like it names them. ``merges`` is
    False for an engine that serves the adapter itself, and gets the base as it is.

    Peak device memory next to the buckets: ``GATHER_BYTES``, or the factors of one bucket's weights where those are
    larger, twice, and this rank's part of them once more; in fp32 ``LONGEST_CHUNK`` elements and two rows.
    """

    def __init__(
        self, inner: ParameterSource, adapters: Adapters, device: torch.device, timeout_seconds: float, merges: bool
    ) -> None:
        super().__init__(device, timeout_seconds, merges)
        self._inner = inner
        self._adapters = adapters
        self.weights = adapters.weights
        self.exported: list[tuple[Shard, tuple[Target, ...]]] = []  # what travels, and what is merged into it
        self._recipes: dict[str, Recipe] = {}
        self._checked = False

    def release(self) -> None:
        super().release()
        self.exported = []
        self._inner.release()

    def shards(self) -> list[Shard]:
        self.release()
        self._adapters.check()
        found = self._inner.shards()
        self.group = self._inner.group
        for shard in found:
            if shard.members and is_adapter(name := shard.members[0].name):
                self.factors.shards[name] = shard
                continue
            recipe = self._recipes.get(shard.base.key)
            if recipe is None or recipe[0] is not shard.base:
                targets = tuple(self._targets(shard.members))
                merge = self.merger(targets, shard.base.first(self.rank)) if targets and self._merges else None
                recipe = self._recipes[shard.base.key] = shard.base, targets, merge
                self._checked = False
            base, targets, merge = recipe
            # Not by replace(), which takes longer
            merging = shard if merge is None else Shard(base, shard.local, merge, shard.members, shard.run)
            self.exported.append((merging, targets))
        if not self._checked:
            exported = {target.weight.name for _, targets in self.exported for target in targets}
            refuse_incomplete(self.weights, exported, tuple(self.factors.shards))
            self._checked = True
        return [shard for shard, _ in self.exported]

    def _targets(self, members: Sequence[ParameterName]) -> Iterator[Target]:
        for member in members:
            if (weight := self.weights.get(member.name)) is None:
                continue
            if self._merges and len(members) > 1:
                tied = " and ".join(each.name for each in members)
                raise ValueError(f"the adapter changes {member.name!r}, but {tied} are {TIED}.")
            if self._merges and member.strides is not None:
                raise ValueError(
                    f"LoRA weight {member.name!r} of shape {member.shape} has strides {member.strides}: weight sync "
                    f"merges into contiguous weights. Make it contiguous() in the model, or {TURN_OFF}."
                )
            yield from targets_of(weight, member.shape)

    def weights_in(self, base: int) -> list[Weight]:
        """The adapted weights in a base."""
        return list({target.weight.name: target.weight for target in self.exported[base][1]}.values())

    def factor_bytes(self, base: int) -> int:
        keys = (key for weight in self.weights_in(base) for key in weight.keys)
        return sum(self.factors.shards[key].base.numel for key in keys) * torch.float32.itemsize

    def gather(self, bases: tuple[int, ...]) -> Generator[None, None, None]:
        keys = tuple(dict.fromkeys(key for base in bases for weight in self.weights_in(base) for key in weight.keys))
        self.gathered = yield from self.factors.gather(keys, self.group if keys else None, torch.float32)
