# SPDX-License-Identifier: Apache-2.0
"""Megatron: tensor, pipeline, virtual pipeline, expert, expert-tensor, context and data parallel.

No collective and no object exchange per tensor: what ranks hold is said once, see ``trainers/joint.py``.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from verl_sync_plugin import log
from verl_sync_plugin.layout.tensors import Base, Shard
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.trainers.joint import JointSource, RankLayout
from verl_sync_plugin.trainers.megatron.bridge import BridgeReader
from verl_sync_plugin.trainers.megatron.model import ModelTensors, flat
from verl_sync_plugin.trainers.megatron.trace import NotACopyError
from verl_sync_plugin.trainers.wire import WirePolicy


class MegatronSource(JointSource):
    """Walks the model chunks of one rank (one per virtual pipeline stage), wrapped or not. ``otherwise`` is the
    bridge's own stream, for a model whose conversion computes."""

    def __init__(
        self, chunks: list[torch.nn.Module], reader: BridgeReader, policy: WirePolicy, otherwise: ParameterSource
    ) -> None:
        super().__init__(policy)
        self._model = ModelTensors(chunks)
        self._reader = reader
        self._otherwise = otherwise
        self._places: dict[str, int] = {}  # of this rank's parameters, by name
        self._shards: list[Shard] = []  # as long as every tensor stays the object it is, and on the device
        self._offloaded: dict[int, torch.Tensor] = {}

    def look(self) -> bool:
        other, moved = self._model.look()
        if other or moved:
            self._shards = []
        return other

    def read(self, run: str) -> RankLayout:
        self._shards = []
        groups = tuple(tuple(dist.get_process_group_ranks(group)) for group in self.groups())
        try:
            found = self._reader.read(self._model, run)
        except NotACopyError as error:
            return RankLayout((), groups, str(error))
        self._places = {part.name: place for place, part in found.items()}
        return RankLayout(tuple(found.values()), groups)

    def instead(self, layouts: list[RankLayout]) -> ParameterSource | None:
        computed = next((layout.computed for layout in layouts if layout.computed), "")
        if not computed:
            return None
        log.say(f"this model goes through the trainer's own weight stream, which is slower: {computed}")
        return self._otherwise

    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        from megatron.core import parallel_state as mpu

        return mpu.get_model_parallel_group(), mpu.get_expert_tensor_model_pipeline_parallel_group()

    def shards(self) -> list[Shard]:
        self._offloaded = self._model.offloaded()
        if self._offloaded:
            return super().shards()
        self._shards = self._shards or super().shards()
        return self._shards

    def shard(self, base: Base, name: str) -> Shard:
        tensor = self._model.tensors[self._places[name]]
        home = self._offloaded.get(tensor.untyped_storage()._cdata)
        return Shard(base, partial(flat, tensor, home), run=None if home is not None else tensor)
