# SPDX-License-Identifier: Apache-2.0
"""Covers rollouts on GPUs of their own: who may be in a group, whose weights are sent, and replicas that had died."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import ray
import torch.distributed as dist
from ray.exceptions import ActorDiedError, ActorUnavailableError
from verl.checkpoint_engine.base import CheckpointEngineManager

from verl_sync_plugin.errors import RegistryConflictError
from verl_sync_plugin.hooks.separate import OutlivingManager, SyncCheckpointEngine
from verl_sync_plugin.rollouts.adapter import SeparateReceiver


@pytest.fixture
def group() -> Iterator[None]:
    """The trainer's, of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def members(**last: Any) -> list[Any]:
    """Two trainer ranks and a rollout rank, each with a GPU; and what the last one has."""
    one = SyncCheckpointEngine(1 << 20, is_master=False, rollout="sglang").prepare()
    trainers = [replace(one, key=f"t{rank}", place=rank, world=2, device=f"gpu-{rank}") for rank in range(2)]
    return [*trainers, replace(one, **{"key": "r", "trainer": False, "device": "gpu-2", **last})]  # type: ignore[arg-type]


@pytest.mark.parametrize(("last", "text"), [
    ({"device": "gpu-1"}, r"trainer rank 1 of 2, rollout rank 0 of 1 compute on the same GPU \(gpu-1\)"),
    ({"cumem": "0"}, r"NCCL_CUMEM_ENABLE differs .* rollout rank 0 of 1 has 0"),
])  # fmt: skip
@pytest.mark.usefixtures("group")
def test_ranks_that_nccl_cannot_join_are_refused(last: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SyncCheckpointEngine.build_topology(2, 1, members(**last))


@pytest.mark.usefixtures("group")
def test_the_others_hear_of_a_stream_that_is_not_the_plugins() -> None:
    sender, closed = SyncCheckpointEngine(1 << 20, is_master=False, rollout="sglang"), []
    sender.prepare()
    member: Any = sender._membership
    member.ranks = SimpleNamespace(close=lambda: closed.append(True))
    with pytest.raises(RegistryConflictError, match="plain weight stream"):
        asyncio.run(sender.send_weights(iter(()), 7))
    assert closed and member.ranks is None


def test_a_sync_that_waited_while_a_later_group_came_ends_and_harms_none() -> None:
    receiver = SeparateReceiver(lambda ranks, _: AsyncMock(agreement=Mock(ranks=ranks)))
    member: Any = SyncCheckpointEngine(1 << 20, is_master=False, rollout="sglang")._membership
    groups = [Mock(), Mock(), Mock()]

    async def queued() -> list[Any]:
        asked = []
        async with receiver._one:  # a sync before these is still ending
            for member.ranks in groups:
                asked.append(asyncio.ensure_future(receiver.receive(member, 7)))
                await asyncio.sleep(0)
        return await asyncio.gather(*asked, return_exceptions=True)

    *late, last = asyncio.run(queued())
    assert all("in another group" in str(each) for each in late) and last is None, (late, last)
    assert [group.close.called for group in groups] == [True, True, False] and member.ranks is groups[2]


def actor(**answers: Any) -> Any:
    """A handle of Ray's, whose calls have answered already, or have failed."""
    return SimpleNamespace(**{name: SimpleNamespace(remote=lambda it=it: it) for name, it in answers.items()})


def replica(rank: int, worker: Any = True, engine: Any = True) -> Any:
    """Holds what the manager reads of one of verl's replicas."""
    workers, servers = [actor(__ray_ready__=worker)], [actor(engine_alive=engine)]
    name = f"server-{rank}"
    return Mock(replica_rank=rank, server_address=name, _server_handle=None, workers=workers, servers=servers)


def answer(reference: Any) -> Any:
    if isinstance(reference, Exception):
        raise reference
    return reference


def test_dead_replicas_are_left_out_and_without_any_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real Ray: ``e2e/test_separate_async.py``."""
    killed, removed, taken = list[Any](), list[str](), list[Any]()
    for name, does in {"wait": lambda asked, **_: (asked, []), "get": answer, "kill": killed.append}.items():
        monkeypatch.setattr(ray, name, does)

    async def sync(self: Any, global_steps: int | None) -> dict[str, int]:
        taken.append([each.replica_rank for each in self.replicas])
        if global_steps == 4:
            raise ValueError("cannot be synced")
        return {"steps": global_steps or 0}

    monkeypatch.setattr(OutlivingManager, "_sync", sync)
    away = ActorUnavailableError("", None)
    replicas = [replica(0, engine=False), replica(1, ActorDiedError()), replica(2, away), replica(3)]
    config: Any = SimpleNamespace(backend="sync_plugin", custom_backend_module=None)
    balancer = SimpleNamespace(remove_servers=SimpleNamespace(remote=removed.extend))
    servers = SimpleNamespace(global_load_balancer=balancer, rollout_replicas=list(replicas))
    manager = OutlivingManager(CheckpointEngineManager(config, None, list(replicas)), servers)  # type: ignore[arg-type]
    assert manager.update_weights(3) == {"steps": 3} and taken == [[2, 3]]
    assert removed == ["server-0", "server-1"] and len(killed) == 4
    assert servers.rollout_replicas == replicas[2:] and servers.server_addresses == ["server-2", "server-3"]
    with pytest.raises(ValueError, match="cannot be synced"):  # with everybody alive it is raised at once
        manager.update_weights(4)
    for each in replicas[2:]:
        each.workers = [actor(__ray_ready__=ActorDiedError())]
    with pytest.raises(RuntimeError, match="every replica of the separate rollout has died; the last: 2, 3"):
        manager.update_weights(5)
    assert taken == [[2, 3]] * 2
