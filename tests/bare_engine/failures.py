# SPDX-License-Identifier: Apache-2.0
"""The story of a sync that fails in ways that ``tests/faults`` does not have; module-level, for spawned processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from bare_engine import stories, trainer
from bare_engine.engine_failures import (
    bytes_change,
    engine_refuses,
    parameters_change,
    peers_out_of_reach,
)
from bare_engine.scenario import Rank
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
    alone = (a_nan_is_gone_again, engine_refuses, parameters_change)
    _fail_each(member, (trainer_diverges, coverage_fails, bytes_change, *alone))
    peers_out_of_reach(member, 100)


def three_syncs_and_failures(member: Rank) -> None:
    """Both stories with one engine, without what depends on the engine alone."""
    stories.three_syncs(member)
    _fail_each(member, (trainer_diverges, coverage_fails, bytes_change))


def _fail_each(member: Rank, failures: tuple[Callable[[Rank, int], str], ...]) -> None:
    for number, fail in enumerate(failures, start=2):
        text = fail(member, number)
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, text)
        assert len(set(texts)) == 1, texts
        # back and forth: ever larger weights would make their rounding show in the tokens' probabilities
        trainer.perturb(member.trainer, seed=number // 2, scale=0.05 if number % 2 else -0.05)
        member.sync(number * 10)
        member.check_exact(f"recovered{number}")


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
        member.manager.comparison._restores = True
        assert member.failing(version) == text and "unwritten, or writes them only in part" in text
        member.manager.comparison._restores = False
    assert any(parameter in text for parameter in DROPPED.values())
    return text
