# SPDX-License-Identifier: Apache-2.0
"""What all processes of a separate run do, and its trainer ranks; they are called by ``driver.py``."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bare_engine import trainer
from bare_engine.scenario import _checkpoint
from separate.counted import CountedRanks

if TYPE_CHECKING:
    from verl_sync_plugin.sync.separate import SeparateManager

TIMEOUT = 20.0
BUCKET_BYTES = 60_000


class Host:
    """What both kinds of process do."""

    def __init__(self, rank: int, world: int, port: int, sync: dict[str, Any], is_master: bool | None) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
        os.environ.update(MASTER_PORT=str(port), SGLANG_CPU_OMP_THREADS_BIND="|".join(map(str, range(world))))
        dist.init_process_group("cpu:gloo", rank=rank, world_size=world)
        from verl_sync_plugin.hooks.separate import SyncCheckpointEngine

        self.engine = SyncCheckpointEngine(
            BUCKET_BYTES, is_master, sync={"timeout_seconds": TIMEOUT, **sync}, rollout="sglang"
        )

    def prepare(self) -> Any:
        return self.engine.prepare()

    def join(self, rank: int, members: Any) -> None:
        self.engine.init_process_group(rank, members)

    def place(self, host: str) -> None:
        """From the next group on this process is on a host of that name, and counts what is broadcast to it."""
        from verl_sync_plugin.sync import membership, ways

        ways.host_name = lambda: host
        membership.JointRanks = CountedRanks  # type: ignore[misc]

    def came(self) -> tuple[dict[int, int], int]:
        """What has come since there is the group, by sender, and ``network_bytes`` of the last sync; see ``place``."""
        assert self.engine._membership is not None
        ranks = self.engine._membership.ranks
        assert isinstance(ranks, CountedRanks)
        return dict(ranks.came), self.report()["network_bytes"]

    def report(self) -> dict[str, Any]:
        """Of the last sync."""
        manager = self.manager()
        assert manager is not None
        return manager.report.as_dict()

    def manager(self) -> SeparateManager | None:
        """The one of the last group, if there was one."""
        raise NotImplementedError

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
        assert manager is not None and manager.planned is not None
        return [int(value) for value in manager.sender.sums(manager.planned)]

    def manager(self) -> SeparateManager | None:
        return self.engine._manager

    def sends(self) -> list[int]:
        """Bytes of every trainer rank's segments, with what fills them up."""
        manager = self.engine._manager
        assert manager is not None and manager.planned is not None
        buckets = manager.planned.buckets
        return [sum(b.stride for b in buckets if place < b.world) for place in range(dist.get_world_size())]

    def packed(self) -> int:
        """Bytes of all segments, without what fills them up behind their last tensor."""
        manager = self.engine._manager
        assert manager is not None and manager.planned is not None
        plan = manager.planned
        ends = {(b, place): 0 for b in range(len(plan.buckets)) for place in range(plan.buckets[b].world)}
        for b, place in ends:
            for part in plan.buckets[b].slices:
                base = plan.bases[part.base]
                if (count := part.count(base, place)) > 0:
                    ends[b, place] = max(ends[b, place], part.offset + count * base.itemsize)
        return sum(ends.values())

    def train(self, seed: int) -> None:
        trainer.perturb(self.trainer, seed)

    def share(self, folder: Path) -> None:
        """See ``trainer.share``."""
        trainer.share(self.trainer, folder)

    def hide_staging(self) -> None:
        """From now on no engine rank can open this rank's slots."""
        from verl_sync_plugin.sync.sender import BucketSender

        honest = BucketSender.export

        def elsewhere(sender: BucketSender, reader: int = 0) -> Any:
            there = honest(sender, reader)
            return replace(there, key=f"gone: {there.key}", handle=("/nowhere/at/all",))

        BucketSender.export = elsewhere  # type: ignore[method-assign]

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


class FSDP1Trainer(Trainer):
    """A trainer rank with verl's own FSDP1 engine, which holds runs of flat parameters."""

    _steps = 0

    def _build(self, model: str) -> object:
        return trainer.build(model, "fsdp")

    def step(self) -> None:
        """Other weights, in place."""
        self._steps += 1
        self.train(self._steps)


class MegatronTrainer(Trainer):
    """A tensor-parallel rank of verl's own Megatron engine, with the bridge that its environment has."""

    def _build(self, model: str) -> object:
        return trainer.build(model, "megatron", tp=dist.get_world_size())

    def step(self) -> None:
        """A real optimizer step."""
        from megatron_cpu.engines import train_step

        train_step(self.trainer)
