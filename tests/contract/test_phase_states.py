# SPDX-License-Identifier: Apache-2.0
"""Syncs, faults, sleeps and wakes in any order, against a small model of what the engine serves."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from one_process import OneProcess, Source
from worlds import run_world

from faults import points
from verl_sync_plugin.errors import SyncError

# What can fail where one process is trainer, engine and server; SGLang's own processes are in tests/faults
FAULTS = (
    *(("leader", stage) for stage in ("plan", "wake", "connect", "pack", "hand over", "load", "commit", "finish")),
    *(("leader", stage) for stage in ("verify", "compare")),
    *(("engine", stage) for stage in ("plan", "connect", "hand over", "load", "commit", "verify")),
    *(("server", stage) for stage in ("wake", "connect", "finish")),
)
TAGS = {"weights", "kv_cache"}


class Phase(RuleBasedStateMachine):
    """The model: which weights the engine serves, whether it answers, and which memory it has released."""

    checkpoint = ""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="phase-"))
        self.real = OneProcess(self.checkpoint, self.folder, verify="always")
        self.served: dict[str, torch.Tensor] | None = None  # none before the first sync, and after one that failed
        self.request = "a wait"  # for the first sync
        self.released: set[str] | None = set()  # unknown after a failure

    def kept(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.real.source.weights.items()}

    @rule()
    def train(self) -> None:
        for tensor in self.real.source.weights.values():
            tensor.add_(torch.randn_like(tensor))

    @rule()
    def offload_and_back(self) -> None:
        self.real.source.move()

    @rule()
    def sleep(self) -> None:
        self.real.sleep()
        self.released = set(TAGS)
        if self.request == "an answer":  # SGLang keeps no copy of the weights, so waking it up is not enough
            self.request = "a wait"

    @rule()
    def wake(self) -> None:
        self.real.actor.wait(self.real.server.resume_tags(sorted(TAGS)))
        self.released = set()

    @rule()
    def sync(self) -> None:
        before = self.kept()
        self.real.sync()
        self.served, self.request, self.released = before, "an answer", set()

    @rule(fault=st.sampled_from(FAULTS), kind=st.sampled_from(("error", "oom")))
    def failing_sync(self, fault: tuple[str, str], kind: str) -> None:
        place, stage = fault
        points.arm(place, stage, kind)
        before = self.kept()
        with pytest.raises(SyncError) as caught:
            self.real.sync()
        assert points.fired(), fault
        assert f"injected: {kind} at {stage!r} in the {place}" in str(caught.value) or fault == ("engine", "connect")
        assert all(torch.equal(before[name], now) for name, now in self.real.source.weights.items())
        self.served, self.request, self.released = None, "a refusal", None

    @invariant()
    def answers_as_modelled(self) -> None:
        assert self.real.request() == self.request

    @precondition(lambda self: self.served is not None)
    @invariant()
    def serves_one_version(self) -> None:
        assert self.served is not None and self.real.model.holds(self.served)

    @precondition(lambda self: self.released is not None)
    @invariant()
    def knows_what_is_released(self) -> None:
        assert self.real.sglang.released == self.released == self.real.server.occupation.released

    def teardown(self) -> None:
        points.arm("", "", "")
        self.real.close()
        shutil.rmtree(self.folder)


def each_once() -> None:
    """Every fault in the first sync, in one that replays, and in place; the machine below orders them at will."""
    for fault in FAULTS:
        phase = Phase()
        for _ in range(3):
            phase.failing_sync(fault=fault, kind="error")
            phase.answers_as_modelled()
            phase.train()
            phase.sync()
            phase.answers_as_modelled()
            phase.serves_one_version()
            phase.sleep()
        phase.teardown()


def play(checkpoint: str) -> None:
    import os

    os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1", CUDA_VISIBLE_DEVICES="")
    for place in ("leader", "engine", "server"):
        points.install(place)
    points.wrap(Source, "shards", "leader", "plan")
    Phase.checkpoint = checkpoint
    each_once()
    found = settings(
        max_examples=10, stateful_step_count=20, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(Phase, settings=found)


@pytest.mark.slow
def test_the_engine_serves_what_the_model_says(tiny_model: Callable[[str], str]) -> None:
    run_world(1, play, tiny_model("qwen2"), timeout=240)
