# SPDX-License-Identifier: Apache-2.0
"""The whole phase of one trainer rank and one engine rank: syncs, faults, sleeps and wakes in any order, staging
memory, mappings, wider dtypes, and engines that rearrange what they have loaded."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from one_process import TIMEOUT, Model, OneProcess, Source
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from worlds import run_world

from faults import points
from verl_sync_plugin.config.settings import SEPARATE_BACKEND, TURN_OFF
from verl_sync_plugin.engine import session
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.tensors import Shard
from verl_sync_plugin.memory import FIRST, REST
from verl_sync_plugin.rollouts.sglang import loader
from verl_sync_plugin.rollouts.sglang.adapter import SyncServerAdapter
from verl_sync_plugin.trainers.base import dtype_name
from verl_sync_plugin.transport.channel import Channel
from verl_sync_plugin.transport.memory import Live, LiveParameters
from verl_sync_plugin.transport.protocol import Committed, together_seconds

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
        self.real.train()

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


# Staging memory stays between syncs where there is room for it next to what the engine resumes, and else goes


def kept(checkpoint: str, folder: str, short: list[bool], failing: int = 0) -> list[tuple[bool, bool, bool]]:
    """Tells for each sync whether the trainer has staging memory after it, whether the engine maps that memory, and
    whether room for staging memory was made before the sync.

    Args:
        short: of each sync, whether the trainer has to hand its cache back before the KV cache is resumed.
        failing: number of a sync whose commit fails in the engine; 0 for none.
    """
    place, found = OneProcess(checkpoint, Path(folder), delivery="staged"), []
    place.manager.keeps_staging = False  # as a manager of an engine that sleeps begins
    for number, tight in enumerate(short, 1):
        asked: dict[tuple[str, str], int] = {}

        def make(resume: tuple[str, str], release: Any, beside: int = 0, tight: bool = tight) -> int | None:
            asked[resume] = beside  # noqa: B023  (called within this round)
            return 0 if tight and resume == REST else None

        place.adapter._room.make = make  # type: ignore[method-assign]
        place.sleep()
        if number == failing:
            (session,) = loader._sessions.values()
            failure = mock.patch.object(session._load, "finish", side_effect=RuntimeError("injected"))
            with failure, pytest.raises(SyncError, match="injected"):
                place.sync()
        else:
            place.sync()
            assert place.model.holds(place.source.weights)
        (session,) = loader._sessions.values()
        found.append((place.manager.sender.staged, bool(session._stagings), asked[FIRST] > 0))
        place.train()
    place.close()
    return found


@pytest.mark.parametrize(
    ("short", "stays"),
    [
        ([True, True, True], [False, False, False]),
        ([True, False, False, True, True], [False, False, True, True, False]),
    ],
)
def test_the_next_sync_does_as_the_room_was(
    short: list[bool], stays: list[bool], tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    (found,) = run_world(1, kept, tiny_model("qwen2"), str(tmp_path), short, timeout=180)
    to_come = [False, *(not stayed for stayed in stays[:-1])]
    assert found == list(zip(stays, stays, to_come, strict=True)), "both sides alike"


def test_what_a_failed_sync_gave_back_is_staged_anew(tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    (found,) = run_world(1, kept, tiny_model("qwen2"), str(tmp_path), [True, True, True, True], 2, timeout=180)
    assert found == [(False, False, number > 0) for number in range(4)]


def mapped() -> int:
    """How many mappings of the trainer's parameters there are in this process, the trainer's own among them."""
    gc.collect()
    return sum(line.endswith(".memory") for line in Path("/proc/self/maps").read_text().splitlines())


def parameters_stay_mapped(checkpoint: str, folder: str) -> None:
    """While they are read in place; not after a staged sync, nor where some of them cannot be mapped."""
    place = OneProcess(checkpoint, Path(folder))
    own, in_place, honest = mapped(), place.manager.ways.in_place, LiveParameters.look

    def half_gone(*args: Any) -> Live:
        live = honest(*args)
        gone = replace(live.regions[-1], key="gone", handle=("/gone",))
        return replace(live, key="half gone", regions=(*live.regions[:-1], gone))

    for wanted, look, direct in (
        *((True, honest, number > 0) for number in range(3)),
        (False, honest, False),
        *((True, honest, True),) * 2,
        *((True, half_gone, False),) * 2,
    ):
        in_place.wanted = wanted
        if not wanted:  # as after a sync that failed before the trainer said where its parameters lie
            next(iter(loader._sessions.values()))._lives = ()
        with mock.patch.object(LiveParameters, "look", look):
            place.sync()
        assert place.model.holds(place.source.weights)
        (session,) = loader._sessions.values()
        assert (place.manager.report.direct_bytes > 0) is direct is bool(session._regions.mapped), place.manager.report
        assert look is half_gone or mapped() == (2 * own if direct else own)
    place.close()


def test_parameters_are_let_go_of_once_they_are_not_read_in_place(
    tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    run_world(1, parameters_stay_mapped, tiny_model("qwen2"), str(tmp_path), timeout=180)


# An engine that keeps some weights in a wider dtype than ``rollout.dtype``


class Wider(Model):
    """Keeps ``a`` in bf16, ``b`` in fp32, and adds one to ``c``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = (torch.nn.Parameter(p.bfloat16(), requires_grad=False) for p in (self.a, self.c))

    def load_weights(self, weights: Any) -> None:
        super().load_weights((name, tensor + 1 if name.startswith("c") else tensor) for name, tensor in weights)

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        own = Wider()
        own.load_weights(weights.items())
        return all(map(torch.equal, (self.a, self.b, self.c), (own.a, own.b, own.c)))


class Rounding(Source):
    """Sends the dtypes of the policy."""

    def _shard(self, name: str, tensor: torch.Tensor) -> Shard:
        wire, honest = self.policy.of_parameter([name], tensor.dtype), super()._shard(name, tensor)
        return replace(honest, base=replace(honest.base, dtype=dtype_name(wire), itemsize=wire.itemsize))


def sync_three_times(checkpoint: str, folder: str) -> dict[str, str]:
    """The dtypes that travel in the end."""
    place = OneProcess(checkpoint, Path(folder), Wider, Rounding, verify="always")
    for _ in range(3):
        place.sync()
        assert place.model.holds(place.source.weights)
        assert place.request() == "an answer"
        place.train()
    planned = place.manager.planned
    place.close()
    assert planned is not None
    return {base.key: base.dtype for base in planned.bases}


def test_what_the_engine_keeps_wider_travels_wider(tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    """The trainer hears of it in the first sync, before anything is loaded, and sends those unrounded."""
    (dtypes,) = run_world(1, sync_three_times, tiny_model("qwen2"), str(tmp_path))
    assert dtypes == {"a.weight": "bfloat16", "b.weight": "float32", "c.q.weight": "float32", "c.k.weight": "float32"}


# An engine that rearranges weights once they are loaded from a checkpoint is refused by name, not served wrongly


# Stand-ins for what SGLang's quantization method of a module does after a load of a checkpoint
METHODS: dict[str, Callable[[Any], object]] = {
    "the same bytes where they were, as many do": lambda layer: setattr(layer.c, "data", layer.c.data.view(30, 30)),
    "reordered, as experts for Blackwell and AMD": lambda layer: layer.c.copy_(layer.c.flip(0)),
    "moved, in the same order": lambda layer: setattr(layer.c, "data", layer.c.data.clone()),
}


def syncs_of_a_method(checkpoint: str, folder: str, method: str, verify: str) -> list[str]:
    """Returns what each of two syncs says of an engine whose module has this method."""
    place, said = OneProcess(checkpoint, Path(folder), verify=verify), []
    place.model.quant_method = SimpleNamespace(process_weights_after_loading=METHODS[method])
    for _ in range(2):
        try:
            place.sync()
            assert place.model.holds(place.source.weights)
            said.append("")
        except SyncError as error:
            said.append(str(error))
    place.close()
    return said


@pytest.mark.parametrize(
    ("method", "verify", "changed"),
    zip(METHODS, ("first", "never", "first"), ("", "SGLang changes c once", "the places of parameters"), strict=True),
)
def test_weights_that_are_rearranged_behind_every_load(
    method: str, verify: str, changed: str, tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    (said,) = run_world(1, syncs_of_a_method, tiny_model("qwen2"), str(tmp_path), method, verify)
    for text in said:
        assert (changed in text and "moe_runner_backend=triton" in text and TURN_OFF in text) if changed else not text


# What else the engine rank promises the trainer rank


def ends_of(checkpoint: str, folder: str) -> tuple[list[list[str]], list[float]]:
    """Returns what the engine rank does at the end of each of two syncs, and how long its waits for a word may be. The
    first sync leaves much in its allocator's cache."""
    place, ends, waits = OneProcess(checkpoint, Path(folder)), list[list[str]](), list[float]()
    reserved, receive = iter([0, session.LEAST_BYTES, 0, session.LEAST_BYTES - 1]), Channel.receive
    with (
        mock.patch.object(session, "_reserved_bytes", lambda: ends.append([]) or next(reserved)),
        mock.patch.object(torch.cuda, "empty_cache", lambda: ends[-1].append("emptied")),
        mock.patch.object(session, "Committed", lambda *args: ends[-1].append("committed") or Committed(*args)),
        mock.patch.object(Channel, "receive", lambda channel, wait: waits.append(wait) or receive(channel, wait)),
    ):
        place.sync()
        place.sync()
    place.close()
    return ends[1::2], waits


def test_the_cache_goes_back_before_the_trainer_hears_of_the_end(
    tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    """For it has the KV cache resumed next. Its first word may take as long as trainer ranks wait for each other, as an
    engine that is awake comes while they plan."""
    ((ends, waits),) = run_world(1, ends_of, tiny_model("qwen2"), str(tmp_path))
    assert ends == [["emptied", "committed"], ["committed"]]
    assert waits.count(together_seconds(TIMEOUT)) == 2


@pytest.mark.parametrize(
    ("backend", "adapter"), [("nccl", SyncServerAdapter.stock), (SEPARATE_BACKEND, SyncServerAdapter)]
)
def test_what_verls_checkpoint_engines_move_is_left_to_verls_adapter(
    backend: str, adapter: type, tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "1")
    config = RolloutConfig(name="sglang", checkpoint_engine=CheckpointEngineConfig(backend=backend), max_model_len=64)
    assert type(SyncServerAdapter(config, HFModelConfig(path=tiny_model("qwen2")), None)) is adapter
