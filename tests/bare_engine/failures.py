# SPDX-License-Identifier: Apache-2.0
"""The story of a sync that fails in every way; module-level, so that spawned processes can import it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from bare_engine import stories, trainer
from bare_engine.engine_failures import (
    bytes_change,
    engine_refuses,
    engine_stalls,
    parameters_change,
    peers_out_of_reach,
)
from bare_engine.scenario import Rank
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.tensors import Shard

# HF tensors that a failing sync leaves out, and the engine's parameters they belong to
DROPPED = {
    "model.layers.1.mlp.down_proj.weight": "model.layers.1.mlp.down_proj.weight (0 of ",
    "model.layers.1.mlp.experts.2.down_proj.weight": "model.layers.1.mlp.experts.w2_weight (6144 of 8192 elements)",
}


def fail_and_recover(member: Rank) -> None:
    """Every kind of failure ends as the same error on all ranks, and the next sync is exact again."""
    trainer.perturb(member.trainer, seed=1)
    member.sync(1)
    everything = (
        trainer_fails,
        trainer_diverges,
        a_nan_is_gone_again,
        engine_refuses,
        engine_stalls,
        coverage_fails,
        bytes_change,
        parameters_change,
    )
    _fail_each(member, (nothing_starts, planning_fails, names_unknown_to_the_engine, *everything))
    peers_out_of_reach(member, 100)


def three_syncs_and_failures(member: Rank) -> None:
    """Both stories with one engine, without what depends on the engine alone."""
    stories.three_syncs(member)
    _fail_each(member, (trainer_fails, trainer_diverges, coverage_fails, bytes_change))


def _fail_each(member: Rank, failures: tuple[Callable[[Rank, int], str], ...]) -> None:
    for number, fail in enumerate(failures, start=2):
        text = fail(member, number)
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, text)
        assert len(set(texts)) == 1, texts
        # back and forth: ever larger weights would make their rounding show in the tokens' probabilities
        trainer.perturb(member.trainer, seed=number // 2, scale=0.05 if number % 2 else -0.05)
        member.sync(number * 10, awake=fail in (planning_fails, engine_stalls))  # as it was left
        member.check_exact(f"recovered{number}")


def nothing_starts(member: Rank, version: int) -> str:
    """The engine cannot resume: no load starts. Then the first bucket cannot be packed: none is waited for."""
    manager, last = member.manager, dist.get_world_size() - 1
    starts = stories.count(member.endpoint, "start_load")
    resume, pack = member.endpoint.resume, manager.sender.pack

    async def broken_resume(tags: list[str]) -> None:
        raise RuntimeError("injected: cannot resume")

    def broken_pack(*args: Any) -> Any:
        raise MemoryError("injected: cannot pack")

    member.endpoint.resume = broken_resume  # type: ignore[method-assign]
    text = member.failing(version)
    member.endpoint.resume = resume  # type: ignore[method-assign]
    assert "rank 0: RuntimeError: injected: cannot resume" in text, text
    assert not starts and manager.meeting.pending is None
    del member.endpoint.start_load  # type: ignore[misc]
    if member.rank == last:
        manager.sender.pack = broken_pack  # type: ignore[method-assign]
    text += member.failing(version)
    manager.sender.pack = pack  # type: ignore[method-assign]
    assert f"rank {last}: MemoryError: injected: cannot pack" in text, text
    pending = manager.meeting.pending
    assert pending is None or pending.finished(), "asked for, and left again"
    assert len(member.endpoint.abandoned) == (2 if member.endpoint.leader else 0), "the engine may not generate"
    return text


@contextmanager
def _shards(member: Rank, spoiled: Callable[[list[Shard]], list[Shard]], rank: int | None = None) -> Iterator[None]:
    """The source of one rank, or of all, hands out other shards meanwhile."""
    source = member.manager.source
    assert source is not None
    if rank in (None, member.rank):
        honest = source.shards
        source.shards = lambda: spoiled(honest())  # type: ignore[method-assign]
    try:
        yield
    finally:
        vars(source).pop("shards", None)


def planning_fails(member: Rank, version: int) -> str:
    """The last rank cannot plan, and its engine rank is on its way already, for the engine is awake."""
    last = dist.get_world_size() - 1

    def broken(shards: list[Shard]) -> list[Shard]:
        raise RuntimeError("injected: no such layer")

    started = time.monotonic()
    with _shards(member, broken, last), pytest.raises(SyncError) as caught:
        asyncio.run(member.manager.update_weights([], version))
    assert time.monotonic() - started < 4, "somebody waited for an engine rank that had been turned away"
    text = str(caught.value)
    assert f"rank {last}: RuntimeError: injected: no such layer" in text, text
    pending = member.manager.meeting.pending
    assert not member.endpoint.leader or (pending is not None and pending.finished()), "asked for, and left again"
    return text


def trainer_fails(member: Rank, version: int) -> str:
    """The last rank cannot read a shard in the middle of the stream."""
    last = dist.get_world_size() - 1

    def no_memory() -> Any:
        raise MemoryError("injected: out of memory")

    def broken(shards: list[Shard]) -> list[Shard]:
        shards = list(shards)
        shards[len(shards) // 2] = replace(shards[len(shards) // 2], local=no_memory)
        return shards

    started = time.monotonic()
    with _shards(member, broken, last):
        text = member.failing(version)
    assert time.monotonic() - started < 30, "the engine waited for its time limit"
    assert f"rank {last}: MemoryError: injected" in text
    return text


def trainer_diverges(member: Rank, version: int) -> str:
    """The last rank's optimizer has produced a NaN."""
    last = dist.get_world_size() - 1
    victim, part = trainer.part_of_last_rank(member.trainer)
    honest = part[7].item()
    if member.rank == last:
        part[7] = float("nan")
    text = member.failing(version)
    part[7] = honest
    assert f"rank {last}: ValueError: parameter {victim!r} holds NaN or Inf" in text, text
    return text


def a_nan_is_gone_again(member: Rank, version: int) -> str:
    """What was packed is what counts, also when the parameter has changed back before anybody looks it up."""
    victim, part = trainer.part_of_last_rank(member.trainer)
    sender, honest = member.manager.sender, member.manager.sender.pack

    def packing(index: int, slot: int, shards: list[Shard]) -> None:
        before = part[7].item()
        if member.rank == dist.get_world_size() - 1:
            part[7] = float("nan")
        honest(index, slot, shards)
        part[7] = before

    sender.pack = packing  # type: ignore[method-assign]
    text = member.failing(version)
    sender.pack = honest  # type: ignore[method-assign]
    assert "was NaN or Inf when it was packed, and in the trainer all of them are finite" in text, text
    assert victim in text or "parameter one of [" in text
    return text


def names_unknown_to_the_engine(member: Rank, version: int) -> str:
    """A tensor that the engine's model skips without a word is an error before anything is loaded, backup or not."""
    known, unknown = "model.layers.1.input_layernorm.weight", "model.layers.1.norm1.weight"

    def renamed(shards: list[Shard]) -> list[Shard]:
        views = [tuple(replace(v, name=unknown) if v.name == known else v for v in s.base.views) for s in shards]
        return [replace(s, base=replace(s.base, views=found)) for s, found in zip(shards, views, strict=True)]

    loads = stories.count(member.manager.sender, "load")
    member.manager.commit.comparison._restores = True
    with _shards(member, renamed):
        text = member.failing(version)
    member.manager.commit.comparison._restores = False
    planned = member.manager.planned
    assert planned is not None
    assert f"leaves out 1 of the {len(planned.names)} tensors" in text and unknown in text
    assert not loads, "something was loaded"
    del member.manager.sender.load  # type: ignore[method-assign]
    return text


def coverage_fails(member: Rank, version: int) -> str:
    """A parameter that the sync does not write, or only in part, is found, with a host copy of it or without."""

    def without_one(shards: list[Shard]) -> list[Shard]:
        view = next(v for s in shards for v in s.base.views if v.name in DROPPED)
        kept = []
        for shard in shards:
            views = tuple(v for v in shard.base.views if v is not view)
            kept.append(replace(shard, base=replace(shard.base, views=views)))
        return kept

    with _shards(member, without_one):
        text = member.failing(version)
        member.manager.commit.comparison._restores = True
        assert member.failing(version) == text and "unwritten, or writes them only in part" in text
        member.manager.commit.comparison._restores = False
    assert any(parameter in text for parameter in DROPPED.values())
    return text
