# SPDX-License-Identifier: Apache-2.0
"""Megatron: tensor, pipeline, virtual pipeline, expert, expert-tensor, context and data parallel, through any bridge.

Every rank tells the others once what it holds; from then on each rank knows which of its bytes go where, and a bucket
carries parts of all ranks that hold the model together, whatever the mix of parallel layouts. No collective and
no object exchange per tensor. Among ranks with the same part (data and context parallel inside a replica, layer norms
of tensor-parallel ranks) one sends it, chosen so that all send about as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from verl_sync_plugin import log
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Base, Plan, View
from verl_sync_plugin.trainers.base import ParameterSource, dtype_name
from verl_sync_plugin.trainers.megatron.layout import RankLayout, Unit, choose_owners, match, replicas
from verl_sync_plugin.trainers.megatron.model import ModelTensors, flat
from verl_sync_plugin.trainers.megatron.reading import LayoutReader
from verl_sync_plugin.trainers.megatron.trace import NotACopyError
from verl_sync_plugin.trainers.wire import WirePolicy
from verl_sync_plugin.transport.agreement import Agreement


class MegatronSource(ParameterSource):
    """Walks the model chunks of one rank.

    Before ``shards`` comes ``agree_on_layout``.

    Args:
        chunks: Megatron's model chunks (one per virtual pipeline stage), wrapped or not.
        reader: of the bridge that loads and exports the model.
        policy: wire dtypes.
        otherwise: the bridge's own stream, for a model whose conversion computes; ``None``: such a model is refused.
    """

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        reader: LayoutReader,
        policy: WirePolicy,
        otherwise: ParameterSource | None = None,
    ) -> None:
        super().__init__()
        self._model = ModelTensors(chunks)
        self._reader = reader
        self._policy = policy
        self._otherwise = otherwise
        self._readings = 0  # of the layout, by all ranks together
        self._layout = RankLayout((), ())
        self._places: dict[str, int] = {}  # of this rank's parameters, by name
        self._shards: list[Shard] = []  # as long as every tensor stays the object it is, and on the device
        self._bases: list[Base] = []  # empty until the ranks have agreed
        self._pending: list[Base] = []
        self._mine: dict[int, int] = {}  # base -> tensor
        self._members: list[tuple[int, ...]] = []

    def agree_on_layout(self, agreement: Agreement) -> ParameterSource:
        """See ``ParameterSource``; the ranks exchange their layouts when any of them has changed."""
        if not agreement.any("looking for the trainer's weights", self._changed):
            return self
        self._readings += 1
        run = f"layout {agreement.number}.{self._readings}"
        agreement.step("reading the layout of the trainer", lambda: self._read(run))
        layouts = agreement.gather("exchanging the layout of the trainer", self._layout)
        computed = next((layout.computed for layout in layouts if layout.computed), "")
        if computed and self._otherwise is not None:
            log.say(f"this model goes through the trainer's own weight stream, which is slower: {computed}")
            return self._otherwise.agree_on_layout(agreement)
        agreement.step("matching the layouts of all ranks", lambda: self._adopt(layouts))
        self._join()
        return self

    def _changed(self) -> bool:
        """Whether this rank holds anything else than what the ranks last agreed on."""
        other, moved = self._model.look()
        if other or moved:
            self._shards = []
        if other:
            self._bases = []
        return not self._bases

    def _read(self, run: str) -> None:
        """Reads this rank's layout.

        Args:
            run: the name of this reading, the same on all ranks.

        Raises:
            ValueError: a parameter is stored in a way that cannot be sent; names it.
        """
        self._bases = []
        groups = _model_parallel_groups()
        try:
            found = self._reader.read(self._model, run)
        except NotACopyError as error:
            if self._otherwise is None:
                raise
            self._layout = RankLayout((), groups, str(error))
            return
        self._places = {parameter.name: place for place, parameter in found.items()}
        self._layout = RankLayout(tuple(found.values()), groups)

    def _adopt(self, layouts: list[RankLayout]) -> None:
        """Works out who sends what.

        Args:
            layouts: of all ranks of the world, in rank order; the same list on every rank.

        Raises:
            ValueError: the ranks disagree, or the bridge cannot convert a parameter; the same text on every rank.
        """
        self._members = replicas(layouts)
        by_replica = match(layouts)
        place = next(index for index, ranks in enumerate(self._members) if dist.get_rank() in ranks)
        units, ranks = by_replica[place], self._members[place]
        nbytes = [_numel(unit.like.shape) * getattr(torch, unit.like.dtype).itemsize for unit in units]
        owners = choose_owners(units, ranks, nbytes)
        bases: list[Base] = []
        self._mine = {}
        named: set[str] = set()
        for unit, sent_by in zip(units, owners, strict=True):
            for part, base in enumerate(self._describe_unit(unit, sent_by, len(ranks), named)):
                if ranks[sent_by[part]] == dist.get_rank():
                    self._mine[len(bases)] = self._places[unit.like.name]
                self._note(len(bases), unit)
                bases.append(base)
        self._pending = bases

    def _note(self, index: int, unit: Unit) -> None:
        """What a kind of source keeps of a base, on every rank."""

    def _describe_unit(self, unit: Unit, owners: tuple[int, ...], world: int, named: set[str]) -> Iterator[Base]:
        like, numel = unit.like, _numel(unit.like.shape)
        products = like.products
        if self._reader.tied:
            # The last pipeline stage has its own copy of a tied embedding, equal to the first stage's
            products = tuple(product for product in products if product.name not in named)
        named.update(product.name for product in products)
        wire = getattr(torch, like.dtype)
        if not like.buffer:
            wire = self._policy.of_parameter([product.name for product in products], wire)
        for part, owner in enumerate(owners if products else ()):
            views = tuple(View(p.name, p.shape, 0, _numel(p.shape), None, p.shares[part]) for p in products)
            lengths = tuple(numel if rank == owner else 0 for rank in range(world))
            key = f"{like.name} (part {part + 1} of {like.parts})" if like.parts > 1 else like.name
            yield Base(key, dtype_name(wire), wire.itemsize, lengths, views)

    def _join(self) -> None:
        """Collective over the world: makes the group of each replica. From here on the layout counts as agreed."""
        self._group = _group_of_replica(self._members)
        self._bases, self._shards = self._pending, []

    def plan(self, bases: tuple[Base, ...], bucket_bytes: int, sharded: bool = False, held: int = 1) -> Plan:
        return plan_buckets(bases, bucket_bytes, sharded, held)

    def shards(self) -> list[Shard]:
        assert self._bases, "the ranks have not agreed on the layout"
        offloaded = self._model.offloaded()
        if offloaded:
            return [self._shard(index, offloaded) for index in range(len(self._bases))]
        if not self._shards:
            self._shards = [self._shard(index, {}) for index in range(len(self._bases))]
        return self._shards

    def _shard(self, index: int, offloaded: dict[int, torch.Tensor]) -> Shard:
        if index not in self._mine:
            return Shard(self._bases[index], _nothing)
        tensor = self._model.tensors[self._mine[index]]
        home = offloaded.get(tensor.untyped_storage()._cdata)
        return Shard(self._bases[index], partial(flat, tensor, home), run=None if home is not None else tensor)


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _nothing() -> torch.Tensor:
    return torch.empty(0)


def _model_parallel_groups() -> tuple[tuple[int, ...], ...]:
    from megatron.core import parallel_state as mpu

    groups = (mpu.get_model_parallel_group(), mpu.get_expert_tensor_model_pipeline_parallel_group())
    return tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)


def _group_of_replica(members: list[tuple[int, ...]]) -> dist.ProcessGroup | None:
    """Collective. A communicator costs device memory, so Megatron's own groups are used where they fit."""
    from megatron.core import parallel_state as mpu

    rank = dist.get_rank()
    if len(members[0]) == 1:
        return None
    if len(members) == 1:
        return dist.group.WORLD
    candidates = (mpu.get_model_parallel_group(), mpu.get_expert_tensor_model_pipeline_parallel_group())
    for group in candidates:
        # Replicas are alike, so all ranks come to the same choice
        if tuple(dist.get_process_group_ranks(group)) in members:
            return group
    groups = [dist.new_group(list(ranks)) for ranks in members]
    return next(group for ranks, group in zip(members, groups, strict=True) if rank in ranks)
