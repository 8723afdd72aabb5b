# SPDX-License-Identifier: Apache-2.0
"""Defines the processes of a separate run, and its trainer ranks of every kind; ``driver.py`` calls them."""

import asyncio
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from wrapt import wrap_function_wrapper

from bare_engine import trainer

TIMEOUT = 20.0
SYNC = {"timeout_seconds": TIMEOUT}
BACKEND, BUCKET_BYTES = "sync_plugin", 60_000
RANK, SCALING = 8, 2  # of adapters
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # SGLang fuses some


class Host:
    def __init__(self, rank: int, world: int, port: int, is_master: bool | None) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
        os.environ.update(MASTER_PORT=str(port), SGLANG_CPU_OMP_THREADS_BIND="|".join(map(str, range(world))))
        dist.init_process_group("cpu:gloo", rank=rank, world_size=world)
        from verl.checkpoint_engine import CheckpointEngineRegistry

        given = {"bucket_size": BUCKET_BYTES, "is_master": is_master, "sync": SYNC, "rollout": "sglang"}
        self.engine: Any = CheckpointEngineRegistry.new(BACKEND, **given)
        self._rounds: list[str] = []

    def prepare(self) -> Any:
        return self.engine.prepare()

    def join(self, rank: int, members: Any) -> None:
        self.engine.init_process_group(rank, members)

    def place(self, host: str) -> None:
        """From the next group on this process is on a host of that name."""
        socket.gethostname = lambda: host  # type: ignore[assignment]

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = self.manager().report.as_dict()
        return report

    def manager(self) -> Any:
        """The one of the last group, if there was one."""
        raise NotImplementedError

    def break_next(self, path: str) -> None:
        """The next call of a method fails; its path begins at this object."""
        *owners, name = path.split(".")
        owner: Any = reduce(getattr, owners, self)
        honest = getattr(owner, name)

        def broken(*args: Any) -> None:
            setattr(owner, name, honest)
            raise MemoryError(f"injected: {name}")

        setattr(owner, name, broken)

    def note_rounds(self) -> None:
        """From now on ``rounds`` has what this rank exchanges with others, by name."""
        from verl_sync_plugin.transport.agreement import Agreement

        def noted(honest: Any, agreement: Agreement, args: Any, more: Any) -> Any:
            self._rounds.append(args[0])
            return honest(*args, **more)

        for name in ("vote", "gather", "share"):
            wrap_function_wrapper(Agreement, name, noted)

    def rounds(self) -> list[str]:
        return self._rounds

    def end(self) -> None:
        dist.destroy_process_group()


class Trainer(Host):
    """A trainer rank with verl's own FSDP2 engine."""

    strategy, lora = "fsdp2", dict[str, Any]()

    def __init__(self, rank: int, world: int, port: int, model: str) -> None:
        super().__init__(rank, world, port, is_master=rank == 0)
        self.trainer: Any = trainer.build(model, self.strategy, self.lora)
        self.model = model

    def sync(self, version: int) -> dict[str, Any]:
        """Sends; returns the report."""
        stream, _ = self.trainer.get_per_tensor_param()
        asyncio.run(self.engine.send_weights(stream, version))
        return self.report()

    def manager(self) -> Any:
        return self.engine._manager

    def train(self, seed: int) -> None:
        trainer.perturb(self.trainer, seed)

    def share(self, folder: Path) -> None:
        trainer.share(self.trainer, folder)

    def hide_staging(self, hidden: bool) -> None:
        """No engine rank can open this rank's slots while they are hidden."""
        from verl_sync_plugin.sync.sender import BucketSender

        honest = BucketSender.reserve

        def elsewhere(*given: Any) -> Any:
            there = honest(*given)
            return replace(there, region=replace(there.region, key="gone", handle=b"/nowhere/at/all"))

        if hidden:
            self._hidden = mock.patch.object(BucketSender, "reserve", elsewhere)
            self._hidden.start()
        else:
            self._hidden.stop()

    def save(self, folder: Path) -> None:
        """Writes the trainer's weights as a checkpoint; collective over the trainer's ranks."""
        full = trainer.full_state(self.trainer)
        if dist.get_rank() == 0:
            trainer.save(full, self.model, folder)


class FSDP1Trainer(Trainer):
    """A trainer rank with verl's own FSDP1 engine, which holds runs of flat parameters."""

    strategy = "fsdp"


class LoRATrainer(Trainer):
    """A rank of verl's own FSDP2 engine with an adapter that is not merged."""

    lora = {"lora_rank": RANK, "lora_alpha": RANK * SCALING, "target_modules": TARGETS}

    @torch.no_grad()
    def train(self, seed: int) -> None:
        """Changes the adapter alone, as training does."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.trainer.module.named_parameters():
            if "lora_" in name:
                local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
                local.add_(torch.randn(local.shape, generator=generator, dtype=local.dtype) * 0.1)

    def save(self, folder: Path) -> None:
        """Writes base and adapter, merged by hand, as a checkpoint; collective over the trainer's ranks."""
        state = self.trainer.module.state_dict()
        full = {n: (t.full_tensor() if isinstance(t, DTensor) else t).float() for n, t in state.items()}
        if dist.get_rank() == 0:
            trainer.save(_merged(full), self.model, folder)


def _merged(full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in full.items():
        if "lora_" not in name:
            of = name.replace("base_layer.weight", "{}.default.weight")
            if of != name:
                tensor = tensor + SCALING * full[of.format("lora_B")] @ full[of.format("lora_A")]
            found[name.removeprefix("base_model.model.").replace(".base_layer", "")] = tensor
    return found


class MergedLoRATrainer(LoRATrainer):
    """A rank of verl's own FSDP2 engine whose adapter is merged on the way."""

    lora = {**LoRATrainer.lora, "lora": {"merge": True}}

    def sync(self, version: int) -> dict[str, Any]:
        """Sends, which changes neither base nor adapter; returns the report."""
        before = trainer.local_state(self.trainer)
        report = super().sync(version)
        assert all(map(torch.equal, before, trainer.local_state(self.trainer))), "the sync changed the trainer"
        return report
