# SPDX-License-Identifier: Apache-2.0
"""Trainer and rollout processes of a separate run, and the calls that verl's driver makes to them.

verl's ``CheckpointEngineManager`` makes these calls through Ray, which the end-to-end test has; here they go through
pipes, so that one set of processes can lose and gain members.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bare_engine import trainer
from bare_engine.endpoint import BareEngine, BareEngineEndpoint
from bare_engine.scenario import PROMPT, _checkpoint

TIMEOUT = 20.0
BUCKET_BYTES = 60_000
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Failure:
    """What a process answers when its call raised."""

    kind: str
    text: str


class Member:
    """A process and the pipe to it; a call is sent by ``ask`` and answered by ``answer``."""

    def __init__(self, kind: type, *args: Any) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(kind, theirs, args), daemon=False)
        self.process.start()
        theirs.close()

    def ask(self, method: str, *args: Any) -> Member:
        self._pipe.send((method, args))
        return self

    def answer(self, seconds: float = 240.0) -> Any:
        """What the call returned, a ``Failure``, or ``None`` when the process is dead."""
        try:
            if not self._pipe.poll(seconds):
                raise TimeoutError("no answer")
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return None

    def end(self) -> None:
        if self.process.is_alive():
            self.ask("end")
            self.process.join(20)
        if self.process.is_alive():
            self.process.kill()


def _serve(kind: type, pipe: Connection, args: tuple[Any, ...]) -> None:
    host = kind(*args)
    pipe.send("ready")
    while True:
        method, given = pipe.recv()
        try:
            pipe.send(getattr(host, method)(*given))
        except Exception as error:
            traceback.print_exc()
            pipe.send(Failure(type(error).__name__, str(error)))
        if method == "end":
            return


class Host:
    """What both kinds of process do."""

    def __init__(self, rank: int, world: int, port: int, sync: dict[str, Any], is_master: bool | None) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
        os.environ.update(MASTER_PORT=str(port), SGLANG_CPU_OMP_THREADS_BIND="0")
        dist.init_process_group("cpu:gloo", rank=rank, world_size=world)
        from verl_sync_plugin.hooks.checkpoint_engine import SyncCheckpointEngine

        self.engine = SyncCheckpointEngine(BUCKET_BYTES, is_master, sync={"timeout_seconds": TIMEOUT, **sync})

    def prepare(self) -> Any:
        return self.engine.prepare()

    def join(self, rank: int, members: Any) -> None:
        self.engine.init_process_group(rank, members)

    def end(self) -> None:
        dist.destroy_process_group()


class Trainer(Host):
    """A trainer rank with verl's own FSDP2 engine."""

    def __init__(self, rank: int, world: int, port: int, model: str, sync: dict[str, Any]) -> None:
        super().__init__(rank, world, port, sync, is_master=rank == 0)
        self.trainer = trainer.build(model, "fsdp2")
        self.model = model

    def sync(self, version: int) -> list[int]:
        """Sends; returns the hashes of what this rank packed."""
        stream, _ = self.trainer.get_per_tensor_param()  # type: ignore[attr-defined]
        asyncio.run(self.engine.send_weights(stream, version))
        manager = self.engine._manager
        assert manager is not None and manager._plan is not None
        return [int(value) for value in manager.sender.sums(manager._plan)]

    def train(self, seed: int) -> None:
        trainer.perturb(self.trainer, seed)

    def share(self, folder: Path) -> None:
        """See ``trainer.share``."""
        trainer.share(self.trainer, folder)

    def break_reading(self) -> None:
        """The next sync cannot read the parameters."""
        manager = self.engine._manager
        assert manager is not None
        honest = manager.sender.read

        def broken(*args: Any) -> None:
            manager.sender.read = honest  # type: ignore[method-assign]
            raise MemoryError("injected: cannot read")

        manager.sender.read = broken  # type: ignore[method-assign]

    def break_packing(self, times: int) -> None:
        """The next bucket to be packed cannot be, that many times."""
        manager = self.engine._manager
        assert manager is not None
        honest, left = manager.sender.pack, [times]

        def broken(*args: Any) -> None:
            if left[0] > 0:
                left[0] -= 1
                raise MemoryError("injected: cannot pack")
            honest(*args)

        manager.sender.pack = broken  # type: ignore[method-assign]

    def save(self, folder: Path) -> None:
        """Writes the trainer's weights as a checkpoint; collective over the trainer's ranks."""
        from safetensors.torch import save_file

        full = trainer.full_state(self.trainer)
        if dist.get_rank() == 0:
            tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in full.items()}
            save_file(tensors, _checkpoint(self.model, folder) / "model.safetensors", metadata={"format": "pt"})


class Endpoint(BareEngineEndpoint):
    """The engine of one rollout rank, which has a place among trainer and rollout ranks."""

    joint: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.joint


class Rollout(Host):
    """A rollout rank and a real SGLang engine of one rank, which starts with random weights."""

    def __init__(self, port: int, model: str, sync: dict[str, Any]) -> None:
        super().__init__(0, 1, port, sync, is_master=None)
        from verl_sync_plugin.rollouts.sglang.separate import SeparateReceiver

        self.sglang = BareEngine(model, 1)
        self.endpoint = Endpoint(self.sglang)
        self.receiver = SeparateReceiver(self._make)

    def _make(self, incoming: Any) -> Any:
        from verl_sync_plugin.sync.separate.managers import SeparateRollout

        self.endpoint.joint = incoming.membership.engine_ranks
        return SeparateRollout(incoming.membership.ranks, self.endpoint, self.engine._config, CPU)

    def sync(self, version: int) -> dict[str, Any]:
        """Receives; returns the report."""
        asyncio.run(self.receiver.receive(self.engine.receive_weights(version), version))
        return self.endpoint.reports[-1]

    def generate(self) -> tuple[list[int], list[float]]:
        return self.sglang.generate(PROMPT, 4)

    def differs(self, checkpoint: Path, folder: Path) -> list[str]:
        """Names of what the engine holds otherwise than after SGLang's own load of a checkpoint."""
        (synced,) = self.sglang.state(folder / "synced")
        self.sglang.load_from_disk(str(checkpoint))
        (loaded,) = self.sglang.state(folder / "loaded")
        assert synced.keys() == loaded.keys()
        return [name for name in loaded if not torch.equal(synced[name], loaded[name])]

    def abandoned(self) -> list[str]:
        return self.endpoint.abandoned

    def die_in_second_bucket(self) -> None:
        """Like a machine that is switched off while weights are on their way."""
        manager = self.receiver._manager
        assert manager is not None
        honest = manager.sender.load

        def dying(index: int, slot: int) -> None:
            if index == 1:
                os._exit(9)
            honest(index, slot)

        manager.sender.load = dying  # type: ignore[method-assign]

    def end(self) -> None:
        self.sglang.shutdown()
        super().end()


def together(members: Sequence[Member], method: str, *args: Any) -> list[Any]:
    """The same call to all, at the same time; their answers in order."""
    for member in members:
        member.ask(method, *args)
    return [member.answer() for member in members]


class Driver:
    """What verl's ``CheckpointEngineManager`` does around a sync."""

    def __init__(self, trainers: list[Member]) -> None:
        self.trainers = trainers

    def sync(self, version: int, rollouts: list[Member]) -> list[Any]:
        """Answers of the trainer ranks, then of the rollout ranks."""
        from verl_sync_plugin.hooks.checkpoint_engine import SyncCheckpointEngine

        everyone = [*self.trainers, *rollouts]
        said = together(everyone, "prepare")
        sizes = len(self.trainers), len(rollouts)
        parts = SyncCheckpointEngine.build_topology(*sizes, said)
        places = [place for part in parts for place in zip(part["rank"], part["members"], strict=True)]
        for member, place in zip(everyone, places, strict=True):
            member.ask("join", *place)
        assert [member.answer() for member in everyone] == [None] * len(everyone)
        return together(everyone, "sync", version)
