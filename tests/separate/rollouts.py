# SPDX-License-Identifier: Apache-2.0
"""The rollout ranks of a separate run, with real SGLang engines; they are called by ``driver.py``."""

import asyncio
import os
from pathlib import Path
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
        self._planned: list[bool] = []

    def _start(self, model: str) -> BareEngine:
        return BareEngine(model, dist.get_world_size(), loaders=(SPOIL,))

    def _note(self, method: str) -> None:
        if method == "load_weights":
            self._planned.append("plan" in self.manager().report.stages)

    def asked_behind_plan(self) -> list[bool]:
        """For each load that was asked for, whether the ranks had planned the sync."""
        return self._planned

    def sync(self, version: int) -> dict[str, Any]:
        """Receives; returns the report, which an engine's first rank has published."""
        asyncio.run(self.adapter.update_weights(self.engine.receive_weights(version), version))
        return self.sglang.reports[-1] if self.sglang else self.report()

    def manager(self) -> Any:
        return self.adapter._separate._manager  # type: ignore[union-attr]

    def generate(self) -> Words:
        words: Words = self.sglang.generate(PROMPT, 4)
        return words

    def differs(self, checkpoint: Path, folder: Path) -> list[str]:
        """Names of what the engine holds otherwise than after SGLang's own load of a checkpoint."""
        differing: list[str] = self.sglang.differs(checkpoint, folder)
        return differing

    def spoil(self, parameter: str) -> None:
        """The engine flips a bit of a parameter after the copies of the next sync."""
        self.sglang.call(self.sglang.ask_loader(SPOIL, parameter))

    def flip_arriving(self) -> None:
        """Flips a bit of the next bucket that comes to this rank, before the engine rank loads it."""
        sender = self.manager().sender
        honest = sender.load

        def flipping(index: int, slot: int) -> None:
            sender.load = honest
            sender._slot(slot)[7] ^= 2
            honest(index, slot)

        sender.load = flipping

    def abandoned(self) -> list[str]:
        return list(self.sglang.abandoned)

    def die_in_second_bucket(self) -> None:
        """Like a machine that is switched off while weights are on their way."""
        sender = self.manager().sender
        honest = sender.load

        def dying(index: int, slot: int) -> None:
            if index == 1:
                os._exit(9)
            honest(index, slot)

        sender.load = dying

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

    def generate_with_base(self) -> Words:
        return super().generate()
