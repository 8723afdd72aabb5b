# SPDX-License-Identifier: Apache-2.0
"""A rollout on GPUs of its own: who may be in one group, what a trainer rank refuses before anything is sent, and
replicas whose processes, which are actors of Ray, have died before a sync. One that dies in a sync:
``e2e/test_separate_async.py``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import ray
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngineManager

from verl_sync_plugin.hooks.separate import OutlivingManager, SyncCheckpointEngine
from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.sync.endpoint import RolloutEndpoint


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


@pytest.mark.parametrize(
    ("last", "text"),
    [
        ({"device": "gpu-1"}, r"trainer rank 1 of 2, rollout rank 0 of 1 compute on the same GPU \(gpu-1\)"),
        ({"cumem": "0"}, r"NCCL_CUMEM_ENABLE differs .* rollout rank 0 of 1 has 0"),
    ],
)
@pytest.mark.usefixtures("group")
def test_ranks_that_nccl_cannot_join_are_refused(last: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SyncCheckpointEngine.build_topology(2, 1, members(**last))


def test_a_trainer_rank_refuses_what_no_engine_of_the_rollout_could_serve_or_hold() -> None:
    """The driver may have had neither the adapter nor the checkpoint."""
    nobody = RolloutEndpoint(rollout_of("sglang"), None)
    assert not nobody.leader and nobody.ranks == ()
    nobody.engine.refuse_adapter({"r": 8}, {})
    with pytest.raises(ValueError, match=r"cannot serve an adapter with use_rslora=True.*lora\.merge=True"):
        nobody.engine.refuse_adapter({"r": 8, "use_rslora": True}, {})
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        nobody.engine.refuse_untied(("GPT2LMHeadModel",), "the adapter's Embedding")


@pytest.mark.usefixtures("group")
def test_the_others_hear_of_a_stream_that_is_not_the_plugins() -> None:
    sender, closed = SyncCheckpointEngine(1 << 20, is_master=False, rollout="sglang"), []
    sender.prepare()
    member: Any = sender._membership
    member.ranks = SimpleNamespace(close=lambda: closed.append(True))
    with pytest.raises(ValueError, match="plain weight stream"):
        asyncio.run(sender.send_weights(iter(()), 7))
    assert closed and member.ranks is None


# Replicas that have died before a sync


@ray.remote(num_cpus=0)
class Process:
    """A worker, or a server with SGLang's processes; or verl's router, as far as it is asked here."""

    def __init__(self) -> None:
        self.engine, self.removed = True, list[str]()

    def pid(self) -> int:
        return os.getpid()

    def end_engine(self) -> None:
        self.engine = False

    def engine_alive(self) -> bool:
        return self.engine

    def remove_servers(self, names: list[str]) -> list[str]:
        self.removed += names
        return self.removed


def replica(rank: int) -> Any:
    """Holds what the manager reads of one of verl's replicas."""
    workers, servers = ([Process.remote()] for _ in range(2))  # type: ignore[attr-defined]
    name = f"server-{rank}"
    return Mock(replica_rank=rank, server_address=name, _server_handle=None, workers=workers, servers=servers)


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
    replicas: list[Any] = [replica(0), replica(1)]
    config = SimpleNamespace(backend="sync_plugin", custom_backend_module=None)
    balancer = Process.remote()  # type: ignore[attr-defined]
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
