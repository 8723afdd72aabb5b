# SPDX-License-Identifier: Apache-2.0
"""What the trainer and rollout processes of a separate run do; they are called by ``driver.py``."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bare_engine import trainer
from bare_engine.endpoint import BareEngine, BareEngineEndpoint
from bare_engine.scenario import PROMPT, _checkpoint

TIMEOUT = 20.0
BUCKET_BYTES = 60_000
CPU = torch.device("cpu")


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

    def place(self, host: str) -> None:
        """From the next group on this process is on a host of that name."""
        from verl_sync_plugin.sync.delivery import reach

        reach.host_name = lambda: host

    def end(self) -> None:
        dist.destroy_process_group()


class Trainer(Host):
    """A trainer rank with verl's own FSDP2 engine."""

    def __init__(self, rank: int, world: int, port: int, model: str, sync: dict[str, Any]) -> None:
        super().__init__(rank, world, port, sync, is_master=rank == 0)
        self.trainer = self._build(model)
        self.model = model

    def _build(self, model: str) -> object:
        return trainer.build(model, "fsdp2")

    def sync(self, version: int) -> list[int]:
        """Sends; returns the hashes of what this rank packed."""
        stream, _ = self.trainer.get_per_tensor_param()  # type: ignore[attr-defined]
        asyncio.run(self.engine.send_weights(stream, version))
        manager = self.engine._manager
        assert manager is not None and manager._plan is not None
        return [int(value) for value in manager.sender.sums(manager._plan)]

    def packed(self) -> int:
        """Bytes of all segments, without what fills them up behind their last tensor."""
        manager = self.engine._manager
        assert manager is not None and manager._plan is not None
        plan = manager._plan
        return sum(b.filled(plan.bases, place) for b in plan.buckets for place in range(b.world))

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


class MegatronTrainer(Trainer):
    """A tensor-parallel rank of verl's own Megatron engine, with the bridge that its environment has."""

    def _build(self, model: str) -> object:
        return trainer.build(model, "megatron", tp=dist.get_world_size())

    def step(self) -> None:
        """A real optimizer step."""
        from megatron_cpu.engines import train_step

        train_step(self.trainer)


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

        self.sglang = self._start(model)
        self.endpoint = self._endpoint()
        self.receiver = SeparateReceiver(self._make)

    def _start(self, model: str) -> BareEngine:
        return BareEngine(model, 1)

    def _endpoint(self) -> Endpoint:
        return Endpoint(self.sglang)

    def break_making(self) -> None:
        """The next group finds this rank unable to take part."""
        honest = self.receiver._make

        def broken(incoming: Any) -> Any:
            self.receiver._make = honest
            raise ValueError("injected: cannot be synced")

        self.receiver._make = broken

    def refuse_once(self, text: str) -> None:
        """The next load of an adapter is refused, as by SGLang."""
        honest = self.endpoint.load_adapter

        async def refusing(*args: Any) -> Any:
            self.endpoint.load_adapter = honest  # type: ignore[method-assign]
            raise RuntimeError(text)

        self.endpoint.load_adapter = refusing  # type: ignore[method-assign]

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
