# SPDX-License-Identifier: Apache-2.0
"""The rollout ranks of a separate run, with real SGLang engines; they are called by ``driver.py``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bare_engine.endpoint import BareEngine, endpoint_of
from bare_engine.scenario import PROMPT
from separate.processes import RANK, TARGETS, Host
from verl_sync_plugin.rollouts.adapter import SeparateReceiver
from verl_sync_plugin.rollouts.sglang.request import ADAPTER_CHECK
from verl_sync_plugin.rollouts.sglang.server import SGLANG_LORA_NAME, SyncSGLangHttpServer
from verl_sync_plugin.sync.separate import SeparateRollout


class Rollout(Host):
    """A rollout rank; the first one of an engine has the real SGLang engine, which starts with random weights."""

    def __init__(self, port: int, model: str, rank: int = 0, tp: int = 1) -> None:
        super().__init__(rank, tp, port, is_master=None)
        self.sglang: Any = self._start(model) if rank == 0 else None
        self.receiver = SeparateReceiver(self._make)
        self.planned: list[bool] = []  # of every load that was asked for, whether the ranks had planned the sync

    def _start(self, model: str) -> BareEngine:
        return BareEngine(model, dist.get_world_size())

    def _make(self, membership: Any) -> Any:
        endpoint = endpoint_of(self.sglang, membership.engine_ranks)
        made = SeparateRollout(membership.ranks, endpoint, self.engine._config, torch.device("cpu"))
        honest = endpoint.start_load

        def start_load(*args: Any) -> Any:
            self.planned.append("plan" in made.report.stages)
            return honest(*args)

        endpoint.start_load = start_load  # type: ignore[method-assign]
        return made

    def asked_behind_plan(self) -> list[bool]:
        return self.planned

    def sync(self, version: int) -> dict[str, Any]:
        """Receives; returns the report, which an engine's first rank has published."""
        asyncio.run(self.receiver.receive(self.engine.receive_weights(version), version))
        return self.sglang.reports[-1] if self.sglang else self.report()

    def manager(self) -> Any:
        return self.receiver._manager

    def generate(self) -> tuple[list[int], list[float]]:
        words: tuple[list[int], list[float]] = self.sglang.generate(PROMPT, 4)
        return words

    def differs(self, checkpoint: Path, folder: Path) -> list[str]:
        """Names of what the engine holds otherwise than after SGLang's own load of a checkpoint."""
        synced = self.sglang.state(folder / "synced")
        self.sglang.load_from_disk(str(checkpoint))
        loaded = self.sglang.state(folder / "loaded")
        assert [ours.keys() for ours in synced] == [theirs.keys() for theirs in loaded]
        pairs = zip(synced, loaded, strict=True)
        return [name for ours, theirs in pairs for name in theirs if not torch.equal(ours[name], theirs[name])]

    def nbytes(self, path: Path) -> list[int]:
        return [sum(tensor.nbytes for tensor in held.values()) for held in self.sglang.state(path)]

    def spoil(self, parameter: str) -> None:
        """The engine flips a bit of a parameter after the copies of the next sync."""
        self.sglang.spoil_next(parameter)

    def _at_next_load(self, act: Callable[[Any, int, int], object]) -> None:
        """Does something right before a bucket that has come to this rank is loaded, of the next sync."""
        sender = self.manager().sender
        honest = sender.load

        def acting(index: int, slot: int) -> None:
            act(sender, index, slot)
            honest(index, slot)

        sender.load = acting

    def flip_arriving(self) -> None:
        """Flips a bit of the next bucket that comes to this rank, before the engine rank loads it."""

        def flip(sender: Any, index: int, slot: int) -> None:
            del sender.load
            sender._slot(slot)[7] ^= 2

        self._at_next_load(flip)

    def abandoned(self) -> list[str]:
        return list(self.sglang.abandoned)

    def die_in_second_bucket(self) -> None:
        """Like a machine that is switched off while weights are on their way."""
        self._at_next_load(lambda sender, index, slot: index == 1 and os._exit(9))

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

    def generate(self) -> tuple[list[int], list[float]]:
        words: tuple[list[int], list[float]] = self.sglang.generate(PROMPT, 4, SGLANG_LORA_NAME)
        return words

    def generate_with_base(self) -> tuple[list[int], list[float]]:
        return super().generate()
