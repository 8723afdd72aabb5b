"""A source whose LoRA weights are merged while they are packed.

Only the small factors are gathered, whole, for the weights of one bucket at a time; the base stays sharded and is never
written. So there is nothing to back up or restore, and a failure leaves the trainer as it was.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from verl_sync_plugin.bucket import Base, Plan, View, plan_buckets
from verl_sync_plugin.lora import LoRAWeight, merge_run
from verl_sync_plugin.receiver.assembly import Assembler
from verl_sync_plugin.source.base import ParameterSource, Shard
from verl_sync_plugin.transport.sender import pack_segment

ADAPTER_PATTERN = r"\.lora_"
_NO_LIMIT = 1 << 62

Merge = tuple[View, LoRAWeight]


def is_adapter(name: str) -> bool:
    """Whether a state-dict key belongs to an adapter."""
    return ".lora_" in name


def merged_name(name: str) -> str | None:
    """The HF name of a PEFT state-dict key; ``None`` for what does not travel; adapters keep their key."""
    if is_adapter(name):
        return name
    if ".original_module." in name:
        return None
    parts = name.removeprefix("base_model.model.").split(".")
    if "modules_to_save" in parts:
        where = parts.index("modules_to_save")
        del parts[where : where + 2]  # modules_to_save.<adapter>
    return ".".join(part for part in parts if part != "base_layer")


class MergingSource(ParameterSource):
    """Wraps the source of a PEFT model.

    Args:
        inner: yields all bases, adapters under their PEFT keys and in the trainer's dtype.
        weights: the adapted weights, named like ``inner`` names them.
        device: where packing happens.
    """

    def __init__(self, inner: ParameterSource, weights: list[LoRAWeight], device: torch.device) -> None:
        super().__init__()
        self._inner = inner
        self._weights = {weight.name: weight for weight in weights}
        self._device = device
        self._adapters: dict[str, Shard] = {}
        self._merges: list[list[Merge]] = []
        self._factors: dict[str, torch.Tensor] = {}
        self._plans: dict[tuple[str, ...], Plan] = {}

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._inner.group

    def shards(self) -> list[Shard]:
        self._adapters, self._merges, self._factors = {}, [], {}
        exported = []
        for shard in self._inner.shards():
            names = [view.name for view in shard.base.views]
            if any(is_adapter(name) for name in names):
                self._keep_adapter(shard, names)
            elif names:
                merges = [(view, self._weights[view.name]) for view in shard.base.views if view.name in self._weights]
                self._refuse_tied(shard.base, merges)
                self._merges.append(merges)
                merge = partial(self._merge, shard.base, merges) if merges else None
                exported.append(replace(shard, merge=merge))
        self._check_complete()
        return exported

    def _check_complete(self) -> None:
        """An adapted weight that is not among the exported would travel unmerged."""
        found = {weight.name for merges in self._merges for _, weight in merges}
        lost = sorted(self._weights.keys() - found)
        lost += [key for w in self._weights.values() for key in (w.a, w.b) if key not in self._adapters]
        if lost:
            raise ValueError(f"LoRA parameters without a counterpart in the trainer's state: {', '.join(lost[:5])}")

    def _keep_adapter(self, shard: Shard, names: list[str]) -> None:
        if len(names) != 1:
            raise ValueError(
                f"{shard.base.key} mixes adapter and other parameters ({', '.join(names[:4])}, ...): weight sync needs "
                "each LoRA factor in a unit of its own. Set actor_rollout_ref.actor.strategy=fsdp2."
            )
        self._adapters[names[0]] = shard

    @staticmethod
    def _refuse_tied(base: Base, merges: list[Merge]) -> None:
        for view, weight in merges:
            tied = [other.name for other in base.views if other.start == view.start and other.name != view.name]
            if tied:
                raise ValueError(
                    f"LoRA adapts {weight.name!r}, which is tied to {tied[0]!r}: merged, the two would differ. "
                    "Exclude it with actor_rollout_ref.model.exclude_modules."
                )

    def prepare(self, bases: tuple[int, ...]) -> None:
        """Collective: gathers both factors of every adapted weight in these bases."""
        wanted = [key for base in bases for _, weight in self._merges[base] for key in (weight.a, weight.b)]
        self._factors = self._gather(tuple(dict.fromkeys(wanted))) if wanted else {}

    def _gather(self, keys: tuple[str, ...]) -> dict[str, torch.Tensor]:
        shards = [self._adapters[key] for key in keys]
        if keys not in self._plans:
            self._plans[keys] = plan_buckets(tuple(shard.base for shard in shards), _NO_LIMIT)
        assembler = Assembler()
        found: dict[str, torch.Tensor] = {}
        for bucket in self._plans[keys].buckets:
            memory = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
            rank = self._rank() if bucket.world > 1 else 0
            pack_segment(memory, bucket, shards, rank)
            if bucket.world > 1:
                mine = memory.narrow(0, rank * bucket.stride, bucket.stride)
                dist.all_gather_into_tensor(memory, mine, group=self.group)
            found.update(assembler.tensors(memory, bucket.entries))
        assembler.finish()
        return found

    def _rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def _merge(self, base: Base, merges: list[Merge], part: torch.Tensor, begin: int) -> torch.Tensor:
        rank = self._rank() if len(base.lengths) > 1 else 0
        first = sum(base.lengths[:rank]) + begin
        merged = part.to(torch.float32, copy=True)
        for view, weight in merges:
            if view.start < first + part.numel() and first < view.start + view.span:
                a, b = self._factors[weight.a], self._factors[weight.b]
                merge_run(merged, first, view.start, view.shape[1], weight, a, b)
        return merged
