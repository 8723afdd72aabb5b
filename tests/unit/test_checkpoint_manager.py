# SPDX-License-Identifier: Apache-2.0
"""verl's driver of separate syncs: what it asks of a group, and replicas whose processes, Ray's actors, die."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import ray
from verl.checkpoint_engine.base import CheckpointEngineManager

from verl_sync_plugin.hooks import separate
from verl_sync_plugin.hooks.separate import OutlivingManager, dead_among


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


class Replica:
    """What the manager looks at of one of verl's."""

    def __init__(self, rank: int) -> None:
        self.replica_rank, self.server_address = rank, f"server-{rank}"
        self._server_handle = None
        self.workers, self.servers = [Process.remote()], [Process.remote()]  # type: ignore[attr-defined]


@ray.remote(num_cpus=0)
class Balancer:
    """verl's router, as far as it is asked here."""

    def __init__(self) -> None:
        self.removed: list[str] = []

    def remove_servers(self, names: list[str]) -> None:
        self.removed += names

    def all_removed(self) -> list[str]:
        return self.removed


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False)
    yield
    ray.shutdown()


def kill(process: Any) -> None:
    os.kill(ray.get(process.pid.remote()), 9)


def manager_of(replicas: list[Any], monkeypatch: pytest.MonkeyPatch, *syncs: Any) -> tuple[OutlivingManager, list[Any]]:
    """The manager, which runs these syncs one after the other; and the replicas of each."""
    taken: list[Any] = []
    left = list(syncs)

    async def sync(self: Any, global_steps: int | None) -> dict[str, int]:
        taken.append([each.replica_rank for each in self.replicas])
        left.pop(0)()
        return {"steps": global_steps or 0}

    monkeypatch.setattr(OutlivingManager, "_sync", sync)
    config = SimpleNamespace(backend="sync_plugin", custom_backend_module=None)
    balancer = Balancer.remote()  # type: ignore[attr-defined]
    servers = SimpleNamespace(global_load_balancer=balancer, rollout_replicas=list(replicas))
    manager = OutlivingManager(CheckpointEngineManager(config, None, replicas), servers)  # type: ignore[arg-type]
    return manager, taken


def removed(manager: OutlivingManager) -> Any:
    return ray.get(manager._servers.global_load_balancer.all_removed.remote())


def test_a_replica_that_dies_in_a_sync_costs_that_sync_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = [Replica(0), Replica(1)]

    def dies() -> None:
        kill(replicas[1].workers[0])
        raise RuntimeError("a rank died")

    manager, taken = manager_of(replicas, monkeypatch, dies, lambda: None)
    assert manager.update_weights(3) == {"steps": 3}
    assert taken == [[0, 1], [0]] and removed(manager) == ["server-1"]
    assert manager._servers.rollout_replicas == replicas[:1] and manager._servers.server_addresses == ["server-0"]


def test_a_replica_whose_engine_is_dead_is_left_out_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = [Replica(0), Replica(1)]
    ray.get(replicas[0].servers[0].end_engine.remote())
    manager, taken = manager_of(replicas, monkeypatch, lambda: None)
    manager.update_weights(1)
    assert taken == [[1]] and removed(manager) == ["server-0"]
    assert dead_among(replicas) == replicas[:1], "whoever waits for it hears that it is gone"


def test_a_failure_with_everybody_alive_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ValueError("cannot be synced")

    manager, taken = manager_of([Replica(0)], monkeypatch, fails)
    with pytest.raises(ValueError, match="cannot be synced"):
        manager.update_weights(1)
    assert taken == [[0]] and removed(manager) == []


def test_without_any_replica_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    last = Replica(0)
    kill(last.servers[0])
    manager, taken = manager_of([last], monkeypatch)
    with pytest.raises(RuntimeError, match="every replica of the separate rollout has died; the last: 0"):
        manager.update_weights(1)
    assert not taken


def test_a_group_that_stands_is_asked_for_the_sync_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a new one is made for other replicas, and after a sync that failed."""
    asked: list[str] = []
    replicas = [Replica(0), Replica(1)]
    honest = OutlivingManager._sync
    manager, _ = manager_of(replicas, monkeypatch)
    monkeypatch.setattr(OutlivingManager, "_sync", honest)
    names = ("abort_replicas", "release_kv_cache_replicas", "resume_kv_cache_replicas", "resume_generation_replicas")
    for name in names:
        monkeypatch.setattr(manager, name, AsyncMock(side_effect=partial(asked.append, name)))
    monkeypatch.setattr(manager, "build_process_group", lambda group: asked.append("group"))
    monkeypatch.setattr(separate, "RayWorkerGroup", lambda **_: SimpleNamespace(update_weights=lambda **_: []))
    manager.actor_wg = SimpleNamespace(update_weights=lambda **_: asked.append("sync") or [])
    whole = [*names[:2], "group", "sync", *names[2:]]

    def synced() -> list[str]:
        asked.clear()
        manager.update_weights(1)
        return asked

    assert [list(synced()) for _ in range(3)] == [whole, ["sync"], ["sync"]]
    manager.remove_replicas([replicas[1]])
    assert [list(synced()) for _ in range(2)] == [whole, ["sync"]]
    with pytest.raises(ZeroDivisionError), monkeypatch.context() as patched:
        patched.setattr(manager.actor_wg, "update_weights", lambda **_: 1 / 0)
        manager.update_weights(2)
    assert [list(synced()) for _ in range(2)] == [whole, ["sync"]]
