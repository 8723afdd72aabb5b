# SPDX-License-Identifier: Apache-2.0
"""verl's driver of separate syncs: replicas whose processes, which are actors of Ray, have died before a sync. One that
dies in a sync, and what is asked of a group that stands: ``e2e/test_separate_async.py``."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from verl.checkpoint_engine.base import CheckpointEngineManager

from verl_sync_plugin.hooks.separate import OutlivingManager


@ray.remote(num_cpus=0)
class Process:
    """A worker, or a server with SGLang's processes."""

    engine = True

    def pid(self) -> int:
        return os.getpid()

    def end_engine(self) -> None:
        self.engine = False

    def engine_alive(self) -> bool:
        return self.engine


@ray.remote(num_cpus=0)
class Balancer:
    """verl's router, as far as it is asked here."""

    def __init__(self) -> None:
        self.removed: list[str] = []

    def remove_servers(self, names: list[str]) -> list[str]:
        self.removed += names
        return self.removed


class Replica:
    """Holds what the manager reads of one of verl's replicas."""

    _server_handle = None

    def __init__(self, rank: int) -> None:
        self.replica_rank, self.server_address = rank, f"server-{rank}"
        self.workers, self.servers = [Process.remote()], [Process.remote()]  # type: ignore[attr-defined]


def test_dead_replicas_are_left_out_and_without_any_the_run_ends(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.init(num_cpus=1, include_dashboard=False)
    request.addfinalizer(ray.shutdown)
    taken: list[Any] = []
    fails = [False, True]

    async def sync(self: Any, global_steps: int | None) -> dict[str, int]:
        taken.append([each.replica_rank for each in self.replicas])
        if fails.pop(0):
            raise ValueError("cannot be synced")
        return {"steps": global_steps or 0}

    monkeypatch.setattr(OutlivingManager, "_sync", sync)
    replicas: list[Any] = [Replica(0), Replica(1)]
    config = SimpleNamespace(backend="sync_plugin", custom_backend_module=None)
    balancer = Balancer.remote()  # type: ignore[attr-defined]
    servers = SimpleNamespace(global_load_balancer=balancer, rollout_replicas=list(replicas))
    manager = OutlivingManager(CheckpointEngineManager(config, None, replicas), servers)  # type: ignore[arg-type]
    ray.get(replicas[0].servers[0].end_engine.remote())
    assert manager.update_weights(3) == {"steps": 3}
    assert taken == [[1]] and ray.get(balancer.remove_servers.remote([])) == ["server-0"]
    assert servers.rollout_replicas == replicas[1:] and servers.server_addresses == ["server-1"]
    with pytest.raises(ValueError, match="cannot be synced"):  # with everybody alive it is raised at once
        manager.update_weights(4)
    os.kill(ray.get(replicas[1].servers[0].pid.remote()), 9)
    with pytest.raises(RuntimeError, match="every replica of the separate rollout has died; the last: 1"):
        manager.update_weights(5)
    assert taken == [[1], [1]]
