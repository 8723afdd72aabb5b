# SPDX-License-Identifier: Apache-2.0
"""The canary's arithmetic, cadence and verdict; on a real engine: ``tests/bare_engine/canary.py``."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import verl
from hydra import compose, initialize_config_dir

from verl_sync_plugin.config.refusals import refuse_canary
from verl_sync_plugin.config.settings import KEY_PREFIX, SyncConfig
from verl_sync_plugin.hooks.driver import settle_trainer
from verl_sync_plugin.report.metrics import metrics_of
from verl_sync_plugin.report.sync_report import SyncReport
from verl_sync_plugin.sync import canary as sync_canary
from verl_sync_plugin.sync.canary import Canary
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.ranks import Alone
from verl_sync_plugin.verify.canary import Scored, apart, canary_prompts

TRAINED = [[-1.0, -2.0], [-3.0, -4.0]]


class _Engine:
    leader = True

    def __init__(self) -> None:
        self.scored = Scored(TRAINED, [[-1.0]], [[-1.0]])

    async def score(self, prompts: Any, response_tokens: int) -> Scored:
        return self.scored


def _log_probs(prompts: Any) -> Generator[None, None, list[list[float]]]:
    yield
    return TRAINED


TRAINER = SimpleNamespace(vocabulary=100, log_probs=_log_probs)


def _canary(**keys: Any) -> tuple[Canary, _Engine]:
    engine = _Engine()
    return Canary(SyncConfig(**keys), Agreement(10.0, ranks=Alone()), engine), engine  # type: ignore[arg-type]


def _sync(canary: Canary) -> SyncReport:
    report = SyncReport(global_steps=5)
    canary.ask_trainer(TRAINER, report)  # type: ignore[arg-type]
    if canary.asked:
        asyncio.run(canary.ask_engine(report))
    return report


def test_prompts_are_the_same_in_every_run_and_known_to_the_model() -> None:
    assert canary_prompts(100) == canary_prompts(100)
    assert all(0 <= token < 50 for prompt in canary_prompts(100) for token in prompt)
    assert len(canary_prompts(100, 3, 5)) == 3 and len(canary_prompts(100, 3, 5)[0]) == 5


def test_the_worst_prompt_counts() -> None:
    found = apart(TRAINED, [[-1.0, -2.0], [-3.5, -4.1]])
    assert found.prompt == 1 and found.count == 4
    assert found.worst == pytest.approx(0.3) and found.mean == pytest.approx(0.15)
    assert found.largest == pytest.approx(0.5)


def test_what_is_no_number_is_infinitely_far() -> None:
    assert apart(TRAINED, [[-1.0, math.nan], [-3.0, -4.0]]).worst == math.inf


def test_other_tokens_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"\[2, 2\] and of \[2, 1\] tokens"):
        apart(TRAINED, [[-1.0, -2.0], [-3.0]])


@pytest.mark.parametrize(
    ("every", "expected"),
    [("always", [1, 1, 1, 1, 1]), ("first", [1, 1, 1, 0, 0]), (2, [1, 0, 1, 0, 1])],
)
def test_cadence(every: str | int, expected: list[int]) -> None:
    canary, _ = _canary(canary="enforce", canary_every=every)
    assert [int(_sync(canary).canary_difference >= 0) for _ in expected] == expected


def test_never_asks_nobody() -> None:
    canary, _ = _canary()
    report = _sync(canary)
    assert not canary.asked and "canary" not in report.stages and report.canary_difference == -1.0


@pytest.mark.parametrize("decoding", [False, True])
def test_log_says_what_enforce_raises(decoding: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(sync_canary, "say", said.append)
    wrong = Scored(TRAINED, [[-1.0]], [[-1.5]]) if decoding else Scored([[-1, -2], [-3.5, -4.5]], [[-1]], [[-1]])
    canary, engine = _canary(canary="log")
    engine.scored = wrong
    report = _sync(canary)
    where = "decodes" if decoding else "trainer's"
    assert len(said) == 1 and where in said[0] and "step 5" in said[0] and "0.5000" in said[0]
    assert max(report.canary_difference, report.canary_decode_difference) == 0.5
    canary, engine = _canary(canary="enforce")
    engine.scored = wrong
    with pytest.raises(RuntimeError, match=rf"0\.5000 .* prompt {0 if decoding else 1} .*canary_threshold=0\.1"):
        _sync(canary)
    assert len(said) == 1


def test_log_keeps_its_cadence() -> None:
    canary, engine = _canary(canary="log", canary_every=2)
    engine.scored = Scored([[-1, -2], [-3, -9]], [[-1]], [[-1]])
    assert [_sync(canary).canary_difference >= 0 for _ in range(4)] == [True, False, True, False]


def test_a_failed_one_is_due_again() -> None:
    canary, engine = _canary(canary="enforce", canary_every=100)
    engine.scored = Scored([[-1, -2], [-3, -9]], [[-1]], [[-1]])
    with pytest.raises(RuntimeError):
        _sync(canary)
    engine.scored = Scored(TRAINED, [[-1]], [[-1]])
    assert _sync(canary).canary_difference == 0.0
    assert _sync(canary).canary_difference == -1.0


def test_metrics_are_of_syncs_that_had_one() -> None:
    without = metrics_of([SyncReport(global_steps=1).as_dict()])
    assert not [name for name in without if "canary" in name]
    reports = [SyncReport(canary_difference=value, canary_decode_difference=0.0).as_dict() for value in (0.01, 0.02)]
    assert metrics_of(reports)["sync/canary_difference"] == 0.02


@pytest.mark.parametrize(
    ("strategy", "backend", "named"),
    [
        ("megatron", "naive", "actor.strategy=megatron"),
        ("fsdp", "naive", "actor.strategy=fsdp"),
        ("fsdp2", "sync_plugin", "checkpoint_engine.backend=sync_plugin"),
        ("fsdp2", "nccl", "checkpoint_engine.backend=nccl"),  # engines on the trainer's GPUs are paused beside it
    ],
)
def test_trainers_that_are_not_asked_are_refused(strategy: str, backend: str, named: str) -> None:
    rollout = {"checkpoint_engine": {"backend": backend}, "custom": {"sync": {"canary": "log"}}}
    with pytest.raises(ValueError, match=rf"{KEY_PREFIX}\.canary='log' with .*{named}: .*canary=never"):
        refuse_canary(rollout, strategy)
    refuse_canary({**rollout, "custom": {}}, strategy)
    refuse_canary({**rollout, "checkpoint_engine": {"backend": "naive"}}, "fsdp2")


def test_the_driver_refuses_it_beside_a_checkpoint_engine_of_verls() -> None:
    given = (f"{KEY_PREFIX}.canary=log", "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl")
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.name=sglang", *given])
    with pytest.raises(ValueError, match=r"canary='log' with .*checkpoint_engine\.backend=nccl: "):
        settle_trainer(config.actor_rollout_ref)


def test_a_trainer_that_syncs_paused_engines_is_refused() -> None:
    rollout = {"custom": {"sync": {"canary": "log"}}}
    with pytest.raises(ValueError, match=r"canary='log' with trainer\.v1\.trainer_mode=colocate_async: .*canary=never"):
        refuse_canary(rollout, "fsdp2", "colocate_async")
    refuse_canary(rollout, "fsdp2", "colocate_sync")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("canary", "warn"), ("canary", True), ("canary_every", "never"), ("canary_every", 0), ("canary_every", True),
        ("canary_threshold", 0), ("canary_threshold", "0.03"), ("canary_threshold", float("nan")),
    ],
)  # fmt: skip
def test_wrong_values_are_named(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{KEY_PREFIX}\.{key}={value!r}: .*Use "):
        SyncConfig.from_mapping({key: value})
