# SPDX-License-Identifier: Apache-2.0
"""The processes beside an engine whose requests are in flight: a trainer rank, and the rollout rank of its server."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from bare_engine import trainer
from separate.processes import TIMEOUT, Host, Trainer
from verl_sync_plugin.config.settings import SEPARATE_BACKEND, sync_config_of


def rollout_config(pause: str, backend: str = SEPARATE_BACKEND) -> Any:
    """verl's, of a separate rollout if no other backend is named."""
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig

    return RolloutConfig(
        name="sglang",
        custom={"sync": {"pause": pause, "timeout_seconds": TIMEOUT}},
        checkpoint_engine=CheckpointEngineConfig(backend=backend),
        max_model_len=256,
    )


class TaughtTrainer(Trainer):
    """The only trainer rank; its weights are those of a checkpoint that it is told of, and lie where others can read
    them."""

    def __init__(self, port: int, model: str, folder: Path) -> None:
        super().__init__(0, 1, port, model, {})
        trainer.share(self.trainer, folder)

    @torch.no_grad()
    def learn(self, checkpoint: Path) -> None:
        """Changes the weights in place, as training does."""
        told = load_file(checkpoint / "model.safetensors")
        for name, parameter in self.trainer.module.named_parameters():  # type: ignore[attr-defined]
            (parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data).copy_(told[name])

    def read_in_place(self, wanted: bool) -> None:
        """Whether the next syncs are read where the parameters lie."""
        _choose(self.engine._manager, wanted)


class ServedRollout(Host):
    """The rollout rank of a server that is in another process: verl's worker beside it, as far as a sync goes."""

    def __init__(self, port: int, model: str, calls: Connection) -> None:
        super().__init__(0, 1, port, {"timeout_seconds": TIMEOUT}, is_master=None)
        from verl.workers.config import HFModelConfig

        from faults.actor import Handle
        from verl_sync_plugin.rollouts.adapter import SeparateReceiver

        self._model, self._server = HFModelConfig(path=model), Handle(calls)
        self.receiver = SeparateReceiver(self._make)

    def _make(self, incoming: Any) -> Any:
        from verl_sync_plugin.rollouts.sglang.adapter import SyncServerAdapter

        adapter: Any = object.__new__(SyncServerAdapter)  # no worker of verl's
        adapter.config, adapter.model_config = rollout_config("abort"), self._model
        adapter._sync, adapter.find_server = sync_config_of(adapter.config), lambda: self._server
        return adapter._make_separate(incoming)

    def sync(self, version: int) -> dict[str, Any]:
        """Receives; returns the report."""
        asyncio.run(self.receiver.receive(self.engine.receive_weights(version), version))
        manager = self.receiver._manager
        assert manager is not None
        return dict(manager.report.as_dict())

    def read_in_place(self, wanted: bool) -> None:
        """See ``TaughtTrainer``."""
        _choose(self.receiver._manager, wanted)


def _choose(manager: Any, wanted: bool) -> None:
    manager.ways.in_place._wanted = wanted
