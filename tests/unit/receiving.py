# SPDX-License-Identifier: Apache-2.0
"""An engine rank that receives two tensors into a model of the test's, without a channel."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from verl_sync_plugin.engine.load import ModelLoad
from verl_sync_plugin.engine.model import EngineModel
from verl_sync_plugin.layout.load_map import LoadMap
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, View
from verl_sync_plugin.transport.protocol import Manifest

CPU, BF16, LENGTH = torch.device("cpu"), torch.bfloat16, 64
Weights = Iterable[tuple[str, torch.Tensor]]


class Engine(EngineModel):
    def load_weights(self, weights: Weights) -> None:
        self.module.load_weights(weights)


class Pair(torch.nn.Module):
    """Two parameters."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b"):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(LENGTH, dtype=BF16), requires_grad=False))

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


class Receiver:
    """The engine rank's half of syncs of two tensors, ``a`` and ``b``, without a channel."""

    def __init__(self, model: torch.nn.Module) -> None:
        bases = [Base(name, "bfloat16", 2, (LENGTH,), (View(name, (LENGTH,), 0, LENGTH),)) for name in ("a", "b")]
        self.plan = plan_buckets(tuple(bases), 1 << 20, False)
        self._nbytes = self.plan.slot_bytes
        self._manifest = Manifest.of(self.plan)
        self.model = model
        self.load = ModelLoad(Engine(self.model, 0), self._manifest, CPU)
        self.introduced = 0  # how often something was found out

    @torch.no_grad()
    def sync(self, a: float, b: float) -> None:
        sent = {"a": torch.full((LENGTH,), a, dtype=BF16), "b": torch.full((LENGTH,), b, dtype=BF16)}
        slot = torch.zeros(self._nbytes, dtype=torch.uint8)
        for entry in self._manifest.buckets[0]:
            for piece in entry.pieces:
                taken = sent[entry.name].view(torch.uint8)[piece.target : piece.target + piece.width]
                slot[piece.source : piece.source + piece.width] = taken
        before: LoadMap = self.load.map
        self.load.begin()
        self.introduced += self.load.map is not before
        self.load.load(0, [slot])
        self.load.finish()
        for name, tensor in sent.items():
            assert torch.equal(getattr(self.model, name).data, tensor), name
