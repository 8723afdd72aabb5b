# SPDX-License-Identifier: Apache-2.0
"""Replicas of a separate rollout, and a trainer, of which everybody notes what the driver asks; the
processes are real Ray actors."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngineManager

from verl_sync_plugin.hooks.separate import OutlivingManager
from verl_sync_plugin.sync.membership import Member


@ray.remote(num_cpus=0)
class Process:
    """A worker, or a server with SGLang's processes."""

    def __init__(self) -> None:
        self.engine = True

    def pid(self) -> int:
        return os.getpid()

    def end_engine(self) -> None:
        self.engine = False

    def engine_alive(self) -> bool:
        return self.engine


@ray.remote(num_cpus=0)
class Notes:
    """What the driver has asked of whom, in its order."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, str]] = []

    def add(self, what: str, who: str) -> None:
        self.noted.append((what, who))

    def take(self) -> list[tuple[str, str]]:
        taken, self.noted = self.noted, []
        return taken


@ray.remote(num_cpus=0)
class Worker:
    """A trainer rank, or verl's worker for an engine rank; it notes what it is asked for."""

    def __init__(self, name: str, trainer: bool, notes: Any) -> None:
        self.name, self.trainer, self.notes, self.fails = name, trainer, notes, False

    def _note(self, what: str) -> None:
        ray.get(self.notes.add.remote(what, self.name))

    def execute_checkpoint_engine(self, method: str, rank: int = -1, members: tuple[Member, ...] = ()) -> Any:
        if method == "prepare":
            self._note("prepare")
            return Member(self.name, self.trainer, 0, 1, "", store=("host", 1) if self.trainer else None)
        assert method == "init_process_group", f"{method} says nothing new"
        assert members[rank].key == self.name, "a rank of its own"
        self._note("join")
        return None

    def update_weights(self, global_steps: int | None = None, mode: str = "") -> None:
        assert mode == ("sync_plugin" if self.trainer else "")
        self._note("update")
        if self.fails:
            self.fails = False
            raise ValueError(f"version {global_steps} cannot be synced")

    def fail_next(self) -> None:
        self.fails = True


class Replica:
    """What the manager looks at of one of verl's."""

    def __init__(self, rank: int) -> None:
        self.replica_rank, self.server_address = rank, f"server-{rank}"
        self._server_handle = None
        self.workers, self.servers = [Process.remote()], [Process.remote()]  # type: ignore[attr-defined]


class RecordingReplica(Replica):
    """One that notes what the driver asks of it, and its worker, too."""

    def __init__(self, rank: int, notes: Any) -> None:
        super().__init__(rank)
        self.name, self._notes = f"replica {rank}", notes
        self.workers = [Worker.remote(f"worker {rank}", False, notes)]  # type: ignore[attr-defined]

    async def _note(self, what: str) -> None:
        await self._notes.add.remote(what, self.name)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        assert not reject_request, "the requests that arrive meanwhile wait"
        await self._note("abort")

    async def release_kv_cache(self) -> None:
        await self._note("release")

    async def resume_kv_cache(self) -> None:
        await self._note("resume cache")

    async def resume_generation(self) -> None:
        await self._note("resume generation")


class Trainers:
    """verl's worker group of the trainer, of one rank."""

    world_size = 1

    def __init__(self, notes: Any) -> None:
        self.worker = Worker.remote("trainer", True, notes)  # type: ignore[attr-defined]

    def execute_checkpoint_engine(self, method: list[str], **more: list[Any]) -> list[Any]:
        (first,) = method
        return [self.worker.execute_checkpoint_engine.remote(first, **{key: value[0] for key, value in more.items()})]

    def update_weights(self, **arguments: Any) -> list[Any]:
        return [self.worker.update_weights.remote(**arguments)]


class Driven:
    """The manager as it is, with two replicas of which everybody notes what is asked."""

    def __init__(self) -> None:
        self._notes = Notes.remote()  # type: ignore[attr-defined]
        self.replicas = [RecordingReplica(0, self._notes), RecordingReplica(1, self._notes)]
        config = SimpleNamespace(backend="sync_plugin", custom_backend_module=None)
        trainers: Any = Trainers(self._notes)
        verls = CheckpointEngineManager(config, trainers, list(self.replicas))  # type: ignore[arg-type]
        self.manager = OutlivingManager(verls, SimpleNamespace())

    def asked(self) -> list[tuple[str, list[str]]]:
        """The rounds of calls since the last look: what was asked, and of whom."""
        trainers: Any = self.manager.actor_wg
        workers = [trainers.worker, *(worker for replica in self.replicas for worker in replica.workers)]
        ray.get([worker.__ray_ready__.remote() for worker in workers])  # a sync that fails waits for nobody
        rounds: list[tuple[str, list[str]]] = []
        for what, who in ray.get(self._notes.take.remote()):
            if not rounds or rounds[-1][0] != what:
                rounds.append((what, []))
            rounds[-1][1].append(who)
        return [(what, sorted(everybody)) for what, everybody in rounds]
