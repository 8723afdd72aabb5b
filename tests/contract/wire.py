# SPDX-License-Identifier: Apache-2.0
"""Syncs weights to SGLang's model classes: a real manager and, in the same process, a real receiver session."""

import asyncio
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from contract import sglang_models as models
from contract.reading import CPU
from contract.sources import SourceManager, StandIn, WorldSource, endpoint_of
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.engine.load import ModelLoad
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.rollouts.sglang import loader
from verl_sync_plugin.rollouts.sglang.request import hand_down, new_token, pack_request
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.transport.protocol import Committed
from verl_sync_plugin.verify import refuse_changed

TIMEOUT = 20.0


class Beside(StandIn):
    """Serves the engine rank in this process; no rank can call another's engine, so each has its own loaded."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def load_weights(self, wire: tuple[Any, ...], version: str | None) -> float:
        loader.load(self.model, pickle.loads(pack_request(wire)))
        return 0.0


def engine_of(model: torch.nn.Module, tp: int) -> RolloutEndpoint:
    hand_down(new_token())
    first = dist.get_rank() // tp * tp
    return endpoint_of(Beside(model), True, range(first, first + tp), restores=True)


class Wire:
    """One rank of a trainer, whose source shares the weights out, and the engine rank next to it, one of ``tp``."""

    def __init__(
        self, model: Any, source: WorldSource | None = None, bucket_bytes: int = 1 << 16, tp: int = 0, **keys: Any
    ) -> None:
        loader._sessions.pop(id(model), None)  # of a model that is gone
        self.model, self.source = model, source or WorldSource()
        endpoint, config = engine_of(model, tp or dist.get_world_size()), SyncConfig(timeout_seconds=TIMEOUT, **keys)
        self.manager = SourceManager(self.source, endpoint, config, bucket_bytes, CPU)
        self.comparison = self.manager.comparison

    def sync(self, weights: models.Weights, flip: Callable[[], None] | None = None) -> SyncReport:
        """Sends ``weights`` into memory that holds rubbish; calls ``flip`` once all of them are loaded."""
        self.source.weights = weights
        models.poison(self.model)
        honest = ModelLoad.finish

        def finish(load: ModelLoad) -> None:
            honest(load)
            if flip is not None:
                flip()

        with mock.patch.object(ModelLoad, "finish", finish):
            asyncio.run(self.manager.update_weights([], 1))
        return self.manager.report

    def exact(self, reference: Any, weights: models.Weights) -> SyncReport:
        """A sync, which leaves what SGLang's own load does."""
        report = self.sync(weights)
        reference.load_weights((name, tensor.clone()) for name, tensor in weights)
        models.check_same(self.model, reference, "the sync")
        return report

    def compare(self) -> None:
        """Compares what was read, and what the parameters hold now, once more."""
        agreement, held, weighed = self.manager.agreement, self.load.held(), torch.empty(0)
        with agreement.attempt():
            refuse_changed(held.changed)
            committed = Committed(sums=self.load.sums(), held=held)
            weighed = self.comparison.weighed(self.manager.sender.sums(self.plan), committed, True)
        agreement.settle("comparing")
        self.comparison.compare(weighed)

    @property
    def load(self) -> ModelLoad:
        found = loader._sessions[id(self.model)]._load
        assert found is not None
        return found

    @property
    def plan(self) -> Plan:
        assert self.manager.planned is not None
        return self.manager.planned

    @property
    def left(self) -> dict[str, str]:
        """Lists what is no mere copy, so the model loads everything itself, and why."""
        names = sorted(self.plan.names)
        return {names[left.tensor]: left.why for left in self.load.map.not_copied}
