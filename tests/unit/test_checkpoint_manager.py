# SPDX-License-Identifier: Apache-2.0
"""verl's driver of separate syncs: its calls of the others, and replicas whose processes die.

The processes are real Ray actors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from driven_replicas import Driven, Replica
from ray.exceptions import RayTaskError
from verl.checkpoint_engine.base import CheckpointEngineManager

from verl_sync_plugin.hooks.separate import OutlivingManager, dead_among


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


@pytest.fixture(scope="module")
def driven() -> Driven:
    return Driven()


def first_rounds(*ranks: int) -> list[tuple[str, list[str]]]:
    """What is asked in the first sync of a group of these replicas, and of whom."""
    replicas = [f"replica {rank}" for rank in ranks]
    return [
        ("abort", replicas),
        ("release", replicas),
        *((what, ["trainer", *(f"worker {rank}" for rank in ranks)]) for what in ("prepare", "join", "update")),
        ("resume cache", replicas),
        ("resume generation", replicas),
    ]


STANDING = first_rounds(0, 1)[4:5]  # the sync itself


def test_a_standing_group_is_asked_for_nothing_but_the_sync(driven: Driven) -> None:
    for version, rounds in ((0, first_rounds(0, 1)), (1, STANDING), (2, STANDING)):
        assert driven.manager.update_weights(version) == {}
        assert driven.asked() == rounds


def test_who_leaves_or_joins_makes_a_new_group(driven: Driven) -> None:
    manager = driven.manager
    for change, ranks in ((manager.remove_replicas, (0,)), (manager.add_replicas, (0, 1))):
        change([driven.replicas[1]])
        for version, rounds in ((3, first_rounds(*ranks)), (4, first_rounds(*ranks)[4:5])):
            manager.update_weights(version)
            assert driven.asked() == rounds


def test_a_failed_sync_resumes_nothing_and_the_next_one_makes_a_new_group(driven: Driven) -> None:
    first, second = (replica.workers[0] for replica in driven.replicas)
    # The group stands, and then it does not
    for fails, rounds in ((second, STANDING), (first, first_rounds(0, 1)[:5])):
        ray.get(fails.fail_next.remote())
        with pytest.raises(RayTaskError, match="version 5 cannot be synced"):
            driven.manager.update_weights(5)
        assert driven.asked() == rounds
    for version, rounds in ((6, first_rounds(0, 1)), (7, STANDING)):
        driven.manager.update_weights(version)
        assert driven.asked() == rounds
