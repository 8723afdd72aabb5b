# SPDX-License-Identifier: Apache-2.0
"""The canary on a real engine and verl's real FSDP2 engine: equal weights pass, a spoiled engine is found, the next
sync recovers."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import numpy as np
import torch

from bare_engine import trainer
from bare_engine.scenario import Rank
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.sync import canary as sync_canary

THRESHOLD = SyncConfig().canary_threshold
NORM = "model.norm.weight"  # matters to every token
OF_LATENT_ATTENTION = 0.2  # SGLang multiplies it in another order than the trainer
ANGLES = "rotary_emb.cos_sin_cache"  # in no checkpoint


def found_and_recovered(member: Rank) -> None:
    """Three equal syncs; then one parameter is spoiled behind the copies, under ``log`` and under ``enforce``."""
    said: list[str] = []
    sync_canary.say = said.append  # type: ignore[assignment]
    _set(member, canary="enforce", threshold=THRESHOLD)
    for version in (1, 2, 3):
        trainer.perturb(member.trainer, seed=version)
        _passes(member, version)
    _spoil_next(member)
    _set(member, canary="log", threshold=THRESHOLD)
    member.sync(4)
    if member.endpoint.leader:
        assert len(said) == 1 and "prompt" in said[0] and f"canary_threshold={THRESHOLD:g}" in said[0], said
        assert member.manager.report.canary_difference > THRESHOLD
    assert not member.endpoint.abandoned, "log lets the run go on"
    _spoil_next(member)
    _set(member, canary="enforce", threshold=THRESHOLD)
    flushes = member.endpoint.flushes
    error = member.failing(5)
    assert "at 'the canary of the engine'" in error and "differ by" in error and "rank 0: " in error, error
    if member.endpoint.leader:
        assert member.endpoint.flushes == flushes, "finished, so requests were let in"
        assert member.endpoint.abandoned, "the engine was not told that it may not generate"
    _set(member, canary="enforce", threshold=THRESHOLD, every=1000)
    _passes(member, 6)  # whatever the cadence says: the last one failed
    member.sync(7)
    assert member.manager.report.canary_difference == -1.0, "not due"


def what_no_comparison_of_bytes_sees_is_found(member: Rank) -> None:
    """The engine computes with other rotary angles: every parameter is proven to hold what was sent, and yet."""
    _set(member, canary="enforce", threshold=THRESHOLD)
    trainer.perturb(member.trainer, seed=1)
    _passes(member, 1)
    _turn_angles(member)
    error = member.failing(2)
    assert "at 'the canary of the engine'" in error and "although the bytes arrived" in error, error
    report = member.manager.report
    assert report.verified_tensors > 0 and report.not_comparable == 0, "the comparison of bytes passed"
    if member.endpoint.leader:
        assert report.canary_difference > 2 * THRESHOLD, report.canary_difference
    _turn_angles(member)
    _passes(member, 3)


def derived_of_before_is_found(member: Rank) -> None:
    """Of latent attention the engine computes with two products of kv_b_proj, which are in no checkpoint."""
    _set(member, canary="enforce", threshold=OF_LATENT_ATTENTION)
    for version in (1, 2):
        trainer.perturb(member.trainer, seed=version)
        _passes(member, version)
    trainer.perturb(member.trainer, seed=3, scale=0.2)
    if member.engine is not None:
        member.engine.keep_derived_next()
    error = member.failing(3)
    assert "at 'the canary of the engine'" in error and "although the bytes arrived" in error, error
    report = member.manager.report
    assert report.verified_tensors == report.tensors > 0, "all parameters hold what was sent"
    assert not member.endpoint.leader or report.canary_difference > 2 * OF_LATENT_ATTENTION, report.canary_difference
    trainer.perturb(member.trainer, seed=4)
    _passes(member, 4)


def a_rank_without_memory_leaves_nobody_alone(member: Rank) -> None:
    """One trainer rank fails where it loads its parameters: the other hears of it before it computes."""
    _set(member, canary="enforce", threshold=THRESHOLD)
    _passes(member, 1)
    with mock.patch.object(type(member.trainer), "eval_mode", _no_memory) if member.rank else nullcontext():
        started = time.monotonic()
        error = member.failing(2)
    assert "at 'the canary of the trainer'" in error and "rank 1: " in error and "no memory" in error, error
    assert "rank 0: " not in error and time.monotonic() - started < 30
    _passes(member, 3)


def found_whatever_it_is(member: Rank) -> None:
    """All stories, on one engine."""
    what_no_comparison_of_bytes_sees_is_found(member)
    a_rank_without_memory_leaves_nobody_alone(member)
    member.endpoint.abandoned.clear()  # both have failed a sync
    found_and_recovered(member)


def _no_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("no memory")


def _turn_angles(member: Rank) -> None:
    if member.engine is not None:
        member.engine.reverse_next(ANGLES)


def _passes(member: Rank, version: int) -> None:
    """A sync with a canary leaves the trainer as it was, and ends well."""
    weights, modes = trainer.local_state(member.trainer), _modes(member)
    states = _random_states()
    member.sync(version)
    assert all(map(torch.equal, weights, trainer.local_state(member.trainer)))
    assert _modes(member) == modes and _same(states, _random_states())
    if member.endpoint.leader:
        report, threshold = member.manager.report, member.manager.canary._config.canary_threshold
        assert 0 <= report.canary_difference <= threshold, report.canary_difference
        assert 0 <= report.canary_decode_difference <= threshold, report.canary_decode_difference
        assert report.stages["canary"] > 0


def _set(member: Rank, canary: str, threshold: float, every: str | int = "always") -> None:
    config = member.manager.canary._config
    changed = replace(config, canary=canary, canary_threshold=threshold, canary_every=every)
    member.manager.canary._config = changed


def _spoil_next(member: Rank) -> None:
    if member.engine is not None:
        member.engine.negate_next(NORM)


def _modes(member: Rank) -> list[bool]:
    return [module.training for module in member.trainer.module.modules()]  # type: ignore[attr-defined]


def _random_states() -> Sequence[object]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def _same(one: Sequence[object], other: Sequence[object]) -> bool:
    return all(a == b for a, b in zip(one, other, strict=True))
