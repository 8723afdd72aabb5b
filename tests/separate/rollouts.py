# SPDX-License-Identifier: Apache-2.0
"""The rollout ranks of a separate run, with real SGLang engines; they are called by ``driver.py``."""

import asyncio
import os
from typing import Any

import torch.distributed as dist
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig

from bare_engine.endpoint import BareEngine, Handle
from bare_engine.trainer import PROMPT, Words
from separate.processes import BACKEND, RANK, SYNC, TARGETS, Host
from verl_sync_plugin.rollouts.sglang.adapter import SyncServerAdapter
from verl_sync_plugin.rollouts.sglang.request import ADAPTER_CHECK
from verl_sync_plugin.rollouts.sglang.server import SGLANG_LORA_NAME, SyncSGLangHttpServer

SPOIL = "bare_engine.loaders.spoil"


class Rollout(Host):
    """A rollout rank; the first one of an engine has the real SGLang engine, which starts with random weights."""

    def __init__(self, port: int, model: str, rank: int = 0, tp: int = 1) -> None:
        super().__init__(rank, tp, port, is_master=None)
        self.sglang: Any = self._start(model) if rank == 0 else None
        os.environ["RAY_LOCAL_WORLD_SIZE"] = str(tp)
        given = {"checkpoint_engine": CheckpointEngineConfig(backend=BACKEND), "custom": {"sync": SYNC}}
        config = RolloutConfig(name="sglang", tensor_model_parallel_size=tp, **given)
        self.adapter = SyncServerAdapter(config, HFModelConfig(path=model), None)
        self.adapter.find_server = lambda: Handle(self.sglang, self._note)  # type: ignore[method-assign]
        self.planned: list[bool] = []  # for each load that was asked for, whether the ranks had planned the sync

    def _start(self, model: str) -> BareEngine:
        return BareEngine(model, dist.get_world_size(), loaders=(SPOIL,))

    def _note(self, method: str) -> None:
        if method == "load_weights":
            self.planned.append("plan" in self.manager().report.stages)

    def sync(self, version: int) -> dict[str, Any]:
        """Receives; returns the report, which an engine's first rank has published."""
        asyncio.run(self.adapter.update_weights(self.engine.receive_weights(version), version))
        return self.sglang.reports[-1] if self.sglang else self.report()

    def manager(self) -> Any:
        return self.adapter._separate._manager  # type: ignore[union-attr]

    def generate(self) -> Words:
        words: Words = self.sglang.generate(PROMPT, 4)
        return words

    def spoil(self, parameter: str) -> None:
        """The engine flips a bit of a parameter after the copies of the next sync."""
        self.sglang.call(self.sglang.ask_loader(SPOIL, parameter))

    def spoil_second_bucket(self, dies: bool) -> None:
        """A bit of it flips before the engine rank loads it, or this process ends, as with a machine's power."""
        sender = self.manager().sender
        honest = sender.load

        def load(index: int, slot: int) -> None:
            if index == 1:
                if dies:
                    os._exit(9)
                sender.load = honest
                sender._slot(slot)[7] ^= 2
            honest(index, slot)

        sender.load = load

    def end(self) -> None:
        if self.sglang:
            self.sglang.shutdown()
        super().end()


class AdapterEngine(BareEngine):
    """Has the engine's adapter replaced, as the rollout server does."""

    _served: Any = None
    load_adapter = SyncSGLangHttpServer.load_adapter


class ServingRollout(Rollout):
    """A rollout rank and a real SGLang engine that serves an adapter."""

    def _start(self, model: str) -> BareEngine:
        lora = {"enable_lora": True, "max_lora_rank": RANK, "lora_target_modules": TARGETS}
        return AdapterEngine(model, 1, loaders=(ADAPTER_CHECK,), lora_backend="torch_native", **lora)

    def generate(self) -> Words:
        words: Words = self.sglang.generate(PROMPT, 4, SGLANG_LORA_NAME)
        return words
