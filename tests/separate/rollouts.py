# SPDX-License-Identifier: Apache-2.0
"""The rollout ranks of a separate run, with real SGLang engines; they are called by ``driver.py``."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bare_engine.endpoint import BareEngine, BareEngineEndpoint
from bare_engine.scenario import PROMPT
from separate.counted import READ
from separate.processes import Host
from verl_sync_plugin.rollouts.sglang.request import dumps

if TYPE_CHECKING:
    from verl_sync_plugin.sync.endpoint import PendingLoad
    from verl_sync_plugin.sync.separate import SeparateManager
    from verl_sync_plugin.transport.protocol import LoadRequest

CPU = torch.device("cpu")
State = dict[str, torch.Tensor]


class Endpoint(BareEngineEndpoint):
    """The engine of one rollout rank, which has a place among trainer and rollout ranks.

    Attributes:
        manager: of the group.
        planned: of every load that was asked for, whether the ranks had planned the sync by then.
    """

    joint: tuple[int, ...] = ()
    manager: SeparateManager

    def __init__(self, engine: BareEngine | None) -> None:
        super().__init__(engine)
        self.planned: list[bool] = []

    def start_load(self, request: LoadRequest, weight_version: str | None) -> PendingLoad:
        self.planned.append("plan" in self.manager.report.stages)
        return super().start_load(request, weight_version)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.joint


class Rollout(Host):
    """A rollout rank; the first one of an engine has the real SGLang engine, which starts with random weights."""

    sglang: BareEngine

    def __init__(self, port: int, model: str, sync: dict[str, Any], rank: int = 0, tp: int = 1) -> None:
        super().__init__(rank, tp, port, sync, is_master=None)
        from verl_sync_plugin.rollouts.adapter import SeparateReceiver

        if rank == 0:
            self.sglang = self._start(model)
        self.endpoint = self._endpoint()
        self.receiver = SeparateReceiver(self._make)

    def _start(self, model: str) -> BareEngine:
        return BareEngine(model, dist.get_world_size(), loaders=(READ,))

    def _endpoint(self) -> Endpoint:
        return Endpoint(getattr(self, "sglang", None))

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
        from verl_sync_plugin.sync.separate import SeparateRollout

        self.endpoint.joint = incoming.membership.engine_ranks
        self.endpoint.manager = SeparateRollout(incoming.membership.ranks, self.endpoint, self.engine._config, CPU)
        return self.endpoint.manager

    def asked_behind_plan(self) -> list[bool]:
        """See ``Endpoint.planned``."""
        return self.endpoint.planned

    def sync(self, version: int) -> dict[str, Any]:
        """Receives; returns the report, which an engine's first rank has published."""
        asyncio.run(self.receiver.receive(self.engine.receive_weights(version), version))
        return self.endpoint.reports[-1] if self.endpoint.leader else self.report()

    def manager(self) -> SeparateManager | None:
        return self.receiver._manager

    def generate(self) -> tuple[list[int], list[float]]:
        return self.sglang.generate(PROMPT, 4)

    def differs(self, checkpoint: Path, folder: Path) -> list[str]:
        """Names of what the engine holds otherwise than after SGLang's own load of a checkpoint."""
        synced, loaded = self.held(checkpoint, folder)
        assert [ours.keys() for ours in synced] == [theirs.keys() for theirs in loaded]
        pairs = zip(synced, loaded, strict=True)
        return [name for ours, theirs in pairs for name in theirs if not torch.equal(ours[name], theirs[name])]

    def held(self, checkpoint: Path, folder: Path) -> tuple[list[State], list[State]]:
        """What the engine's ranks hold, and what they hold after SGLang's own load of a checkpoint."""
        synced = self.sglang.state(folder / "synced")
        self.sglang.load_from_disk(str(checkpoint))
        return synced, self.sglang.state(folder / "loaded")

    def read(self, path: Path) -> list[int]:
        """Bytes that every engine rank has read since this was called the last time, which must be once before."""
        self.sglang.call(self.sglang._update(dumps([(str(path), torch.empty(0))]), READ, None))
        return [int(Path(f"{path}.{rank}").read_text()) for rank in range(self.sglang.tp)]

    def nbytes(self, path: Path) -> list[int]:
        """What the parameters of every engine rank take."""
        return [sum(tensor.nbytes for tensor in held.values()) for held in self.sglang.state(path)]

    def spoil(self, parameter: str) -> None:
        """The engine flips a bit of a parameter behind the copies of the next sync."""
        self.sglang.spoil_next(parameter)

    def flip_arriving(self) -> None:
        """The next bucket that comes to this rank has another bit when the engine rank is told to load it."""
        manager = self.receiver._manager
        assert manager is not None
        sender, honest = manager.sender, manager.sender.load

        def flipping(index: int, slot: int) -> None:
            sender.load = honest  # type: ignore[method-assign]
            sender._slot(slot)[7] ^= 2
            honest(index, slot)

        sender.load = flipping  # type: ignore[method-assign]

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
        if self.endpoint.leader:
            self.sglang.shutdown()
        super().end()
