# SPDX-License-Identifier: Apache-2.0
"""Failures of the engine, of what connects it, and of the bytes between; module-level, for spawned processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from bare_engine import trainer
from bare_engine.scenario import Rank
from verl_sync_plugin.layout.tensors import Entry, Plan, Shard
from verl_sync_plugin.transport.memory import StagingExport


def engine_refuses(member: Rank, version: int) -> str:
    """The engine's own loader rejects a tensor: the scheduler survives and says why."""
    manager, victim = member.manager, "model.layers.1.mlp.down_proj.weight"
    honest = manager.make_plan

    def make(*arguments: Any) -> Plan:
        plan = honest(*arguments)
        buckets = tuple(replace(b, entries=tuple(_transposed(e, victim) for e in b.entries)) for b in plan.buckets)
        return replace(plan, digest=f"broken {plan.digest}", buckets=buckets)

    manager.make_plan = make  # type: ignore[method-assign]
    text = member.failing(version)
    manager.make_plan = honest  # type: ignore[method-assign]
    assert "the engine could not load the weights" in text, text
    return text


def _transposed(entry: Entry, name: str) -> Entry:
    return replace(entry, shape=entry.shape[::-1]) if entry.name == name else entry


def bytes_change(member: Rank, version: int) -> str:
    """One bit flips in one rank's slot after it was hashed; the engine that reads it says so, whoever packed it."""
    sender, last = member.manager.sender, dist.get_world_size() - 1
    honest, packed = sender.pack, 0

    def flipping(index: int, slot: int, shards: list[Shard]) -> None:
        nonlocal packed
        honest(index, slot, shards)
        packed += 1
        if packed == 2 and member.rank == last:
            sender._slot(slot)[71] ^= 128  # the highest bit of a word, where a sum over ranks is weakest

    # Later, in "load", the engine rank beside another trainer rank could have read it already
    sender.pack = flipping  # type: ignore[method-assign]
    text = member.failing(version)
    sender.pack = honest  # type: ignore[method-assign]
    assert "the bytes of model." in text and "changed on the way to the engine" in text, text
    return text


def parameters_change(member: Rank, version: int) -> str:
    """One bit flips in the engine's own parameters, behind all copies. What no rank reads has not changed, and only the
    comparison of the destination finds it; without that the sync goes through."""
    victim, cadence = "model.layers.1.mlp.gate_up_proj.weight", member.manager.cadence
    for verify in ("never", "always"):
        cadence._verify = verify
        if member.engine is not None:
            member.engine.spoil_next(victim)
        if verify == "never":
            member.sync(version)
            assert member.manager.report.verified_tensors == 0
    text = member.failing(version)
    assert "do not hold what was sent of model.layers.1.mlp." in text, text
    return text


def peers_out_of_reach(member: Rank, version: int) -> None:
    """An engine rank cannot open another trainer rank's memory: this sync and later ones go by broadcast."""
    manager, last = member.manager, dist.get_world_size() - 1
    assert manager.report.peer_bytes > 0 == manager.report.gathered_bytes, "the syncs before were not"
    sender = manager.sender
    honest = sender.export

    def elsewhere(reader: int) -> StagingExport:
        gone = replace(honest(reader), key=f"gone for {reader}", handle=("/nowhere/at/all",))
        return honest(reader) if reader == last else gone

    sender.close()  # what is open stays open
    manager.agreed_digest = ""
    sender.export = elsewhere if member.rank == last else honest  # type: ignore[assignment, method-assign]

    abandoned = len(member.endpoint.abandoned)
    for again in (version + 1, version + 2):
        trainer.perturb(member.trainer, seed=again)
        member.sync(again)
        member.check_exact(f"broadcast{again}")
        assert manager.report.gathered_bytes > 0 == manager.report.peer_bytes
    assert len(member.endpoint.abandoned) == abandoned, "a sync that goes on otherwise has not failed"
