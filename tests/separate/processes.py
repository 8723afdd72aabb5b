# SPDX-License-Identifier: Apache-2.0
"""What the trainer and rollout processes of a separate run do; they are called by ``driver.py``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bare_engine import trainer
from bare_engine.endpoint import BareEngine, BareEngineEndpoint
from bare_engine.scenario import PROMPT, _checkpoint
from verl_sync_plugin.sync.endpoint import LoadOutcome

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
    """A trainer rank with one of verl's own engines, sharded as ``layout`` says."""

    def __init__(
        self, rank: int, world: int, port: int, model: str, sync: dict[str, Any], strategy: str, layout: dict[str, Any]
    ) -> None:
        super().__init__(rank, world, port, sync, is_master=rank == 0)
        self.trainer = trainer.build(model, strategy, **layout)
        self.model = model

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

    def train_adapter(self, seed: int) -> dict[str, torch.Tensor]:
        """Changes the adapter alone; returns its factors whole, in bf16, by their names in PEFT's checkpoints."""
        module: Any = self.trainer.module  # type: ignore[attr-defined]
        factors = {name: p.detach() for name, p in module.named_parameters() if "lora_" in name}
        generator = torch.Generator().manual_seed(seed)
        for factor in factors.values():
            local = factor.to_local()
            local.add_(torch.randn(local.shape, generator=generator) * 0.1)
        whole = {name.replace(".default.", "."): factor.full_tensor() for name, factor in factors.items()}
        return {name: factor.to(torch.bfloat16) for name, factor in whole.items()}

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
    """The engine of one rollout rank, which has a place among trainer and rollout ranks.

    It keeps what it is told to serve: whether SGLang does is shown by ``tests/e2e/test_separate_lora.py``.
    """

    joint: tuple[int, ...] = ()
    refuses_adapters = False

    def __init__(self, engine: BareEngine) -> None:
        super().__init__(engine)
        self.adapters: list[tuple[dict[str, Any], dict[str, torch.Tensor], str | None]] = []

    async def load_adapter(
        self, settings: Mapping[str, Any], factors: dict[str, torch.Tensor], weight_version: str | None
    ) -> LoadOutcome:
        if self.refuses_adapters:
            raise RuntimeError("injected: no room for the adapter")
        self.adapters.append((dict(settings), factors, weight_version))
        return LoadOutcome(nbytes=sum(factor.nbytes for factor in factors.values()))

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

    def break_making(self) -> None:
        """The next group finds this rank unable to take part."""
        honest = self.receiver._make

        def broken(incoming: Any) -> Any:
            self.receiver._make = honest
            raise ValueError("injected: cannot be synced")

        self.receiver._make = broken

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

    def adapters(self) -> list[tuple[dict[str, Any], dict[str, torch.Tensor], str | None]]:
        return self.endpoint.adapters

    def refuse_adapters(self, refuses: bool) -> None:
        self.endpoint.refuses_adapters = refuses

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
