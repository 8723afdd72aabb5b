# SPDX-License-Identifier: Apache-2.0
"""Plays the whole phase of one trainer rank and one engine rank in one process. All is the product's own but Ray and
SGLang: a load runs in a thread, and released memory is only noted."""

import asyncio
import gc
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sglang.srt.utils import MultiprocessingSerializer
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode
from worlds import on_ranks

from contract.sources import SourceManager, in_a_file, reads_unseen, shard_of
from faults import points
from faults.actor import Reference, worker_calls
from verl_sync_plugin.config.settings import SEPARATE_BACKEND, TURN_OFF, sync_config_of
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.tensors import Shard
from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.rollouts.adapter import calls_of
from verl_sync_plugin.rollouts.sglang import loader
from verl_sync_plugin.rollouts.sglang.adapter import SyncServerAdapter
from verl_sync_plugin.rollouts.sglang.request import hand_down, new_token
from verl_sync_plugin.rollouts.sglang.server import SyncSGLangHttpServer
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.trainers.base import ParameterSource, ShardStream
from verl_sync_plugin.transport.channel import Channel
from verl_sync_plugin.transport.memory import Location, NotInPlaceError, ParameterLocator, Regions
from verl_sync_plugin.transport.protocol import Committed, agreement_seconds

CPU = torch.device("cpu")
SIZES = {"a.weight": (40, 30), "b.weight": (7,), "c.q.weight": (20, 30), "c.k.weight": (10, 30)}
BUCKET_BYTES = 3000
TIMEOUT = 20.0


class Model(torch.nn.Module):
    """An engine's model, which fuses two tensors of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("a", (40, 30)), ("b", (7,)), ("c", (30, 30))):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))

    def load_weights(self, weights: Any) -> None:
        rows = {"c.q.weight": slice(0, 20), "c.k.weight": slice(20, 30)}
        for name, tensor in weights:
            target = getattr(self, name.split(".")[0])
            (target[rows[name]] if name in rows else target).copy_(tensor)

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        fused = torch.cat([weights["c.q.weight"], weights["c.k.weight"]])
        return all(map(torch.equal, (self.a, self.b, self.c), (weights["a.weight"], weights["b.weight"], fused)))


class Source(ParameterSource):
    """Parameters of a trainer of one rank, in memory that the engine rank can map."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.weights = {name: torch.randn(shape) for name, shape in SIZES.items()}
        self.move()

    def move(self) -> None:
        """To other memory, as an offload would."""
        self.weights = {name: in_a_file(tensor, self._folder) for name, tensor in self.weights.items()}

    def shards(self) -> list[Shard]:
        return [shard_of((name,), tensor, 0, 1) for name, tensor in self.weights.items()]


class TokenizerManager:
    """Answers as SGLang's does; a load runs in a thread, as it would in the scheduler."""

    server_args = SimpleNamespace(tp_size=1, dp_size=1)
    _update_weight_version_if_provided = print

    def __init__(self, model: Model) -> None:
        self._model = model
        self.released: set[str] = set()

    async def update_weights_from_tensor(self, obj: Any, request: None) -> tuple[bool, str]:
        assert "weights" not in self.released, "SGLang would write into memory that is not there"
        named = MultiprocessingSerializer.deserialize(obj.serialized_named_tensors[0])
        await asyncio.to_thread(loader.load, self._model, named)
        return True, ""

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        raise AssertionError("there is no scheduler that generates")
        yield

    async def flush_cache(self) -> Any:
        assert "kv_cache" not in self.released, "SGLang would crash (sglang #19029)"
        return SimpleNamespace(success=True)

    async def release_memory_occupation(self, obj: Any, request: None) -> None:
        assert not self.released & set(obj.tags), "the memory saver would end the process"
        self.released |= set(obj.tags)

    async def resume_memory_occupation(self, obj: Any, request: None) -> None:
        assert self.released >= set(obj.tags), "SGLang would raise KeyError"
        self.released -= set(obj.tags)


class Actor:
    """The handle of a server whose loop runs in a thread."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._ask(getattr(self._server, method)(*args)))

    def _ask(self, call: Any) -> Reference:
        reference = Reference()
        reference.answer = asyncio.run_coroutine_threadsafe(call, self._loop)
        return reference

    def wait(self, call: Any) -> Any:
        return self._ask(call).answer.result(TIMEOUT)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class OneProcess:
    """Makes trainer and engine, one pair per process at a time; ``keys`` are of ``custom.sync``."""

    def __init__(self, checkpoint: str, folder: Path, **keys: Any) -> None:
        os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1", CUDA_VISIBLE_DEVICES="")
        loader.tensor_parallel_rank = lambda: 0
        loader._sessions.clear()
        hand_down(new_token())
        sync = {"timeout_seconds": TIMEOUT, **keys}
        config = RolloutConfig(name="sglang", tensor_model_parallel_size=1, custom={"sync": sync}, max_model_len=64)
        model_config = HFModelConfig(path=checkpoint)
        self.model, self.source = Model(), Source(folder)
        self.server = SyncSGLangHttpServer(config, model_config, RolloutMode.HYBRID, [], 0, 0, 1, "", 0)
        self.server.tokenizer_manager = self.sglang = TokenizerManager(self.model)
        self.server.guard_requests()
        self.actor = Actor(self.server)
        mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "infer_tp", "infer_pp"))
        self.adapter = SyncServerAdapter(config, model_config, mesh)
        self.adapter.find_server = lambda: self.actor  # type: ignore[method-assign]
        leads = RolloutEndpoint(rollout_of("sglang"), calls_of(self.actor, ""), (0,), False, TIMEOUT, False)
        self.manager = SourceManager(self.source, leads, sync_config_of(config), BUCKET_BYTES, CPU)
        self.adapter._manager = self.manager
        self._version = 0

    def sync(self) -> None:
        self._version += 1
        asyncio.run(worker_calls(self.adapter, ShardStream(None, list), self._version))

    def train(self) -> None:
        for tensor in self.source.weights.values():
            tensor.add_(torch.randn_like(tensor))

    def sleep(self) -> None:
        self.actor.wait(self.server.sleep())

    def request(self) -> str:
        """Returns what a request would get now."""
        try:
            self.actor.wait(asyncio.wait_for(self.server._gate.enter(), 0.05))
        except TimeoutError:
            return "a wait"
        except RuntimeError:
            return "a refusal"
        return "an answer"

    def close(self) -> None:
        self.manager.sender.close()
        self.manager.connection.close()
        self.actor.close()

    def end_well(self) -> None:
        """One more sync of other weights is exact, and the engine generates."""
        self.train()
        self.sync()
        assert self.model.holds(self.source.weights) and self.request() == "an answer"
        self.close()


# What can fail where one process is trainer, engine and server; SGLang's own processes are in tests/faults
FAULTS = (
    *(("leader", stage) for stage in ("plan", "wake", "connect", "pack", "hand over", "load", "commit", "finish")),
    *(("leader", stage) for stage in ("verify", "compare")),
    *(("engine", stage) for stage in ("plan", "connect", "hand over", "load", "commit", "verify")),
    *(("server", stage) for stage in ("wake", "connect", "finish")),
)
TAGS = {"weights", "kv_cache"}
SESSION = "verl_sync_plugin.engine.session"


class Phase:
    """Says which weights the engine serves, what a request gets, and which memory is released."""

    def __init__(self, checkpoint: str, folder: Path) -> None:
        folder.mkdir()
        self.real = OneProcess(checkpoint, folder, verify="always")
        self.served: dict[str, torch.Tensor] | None = None  # none before the first sync, and after one that failed
        self.request = "a wait"  # for the first sync
        self.released: set[str] | None = set()  # unknown after a failure

    def check(self) -> None:
        assert self.real.request() == self.request
        assert self.served is None or self.real.model.holds(self.served)
        released = self.real.sglang.released
        assert self.released is None or released == self.released == self.real.server.occupation.released

    def train(self) -> None:
        self.real.train()

    def offload_and_back(self) -> None:
        self.real.source.move()

    def sleep(self) -> None:
        self.real.sleep()
        self.released = set(TAGS)
        if self.request == "an answer":  # SGLang keeps no copy of the weights, so waking it up is not enough
            self.request = "a wait"

    def wake(self) -> None:
        self.real.actor.wait(self.real.server.resume_tags(sorted(TAGS)))
        self.released = set()

    def sync(self, place: str = "", stage: str = "", kind: str = "") -> None:
        """One that fails at a stage, if there is one."""
        points.arm(place, stage, kind)
        before = {name: tensor.clone() for name, tensor in self.real.source.weights.items()}
        with pytest.raises(SyncError) if stage else nullcontext() as caught:
            self.real.sync()
        assert points.fired(), (place, stage)
        assert all(torch.equal(before[name], now) for name, now in self.real.source.weights.items())
        self.served, self.request, self.released = (None, "a refusal", None) if stage else (before, "an answer", set())
        said = f"injected: {kind} at {stage!r} in the {place}"
        assert not stage or said in str(caught.value) or (place, stage) == ("engine", "connect")


@pytest.mark.slow
@on_ranks(1, timeout=240)
def test_the_engine_serves_what_the_model_says(qwen2: str, tmp_path: Path) -> None:
    """With every fault in the first sync, in one that replays, and in place; and anything in any order in between."""
    for place in ("leader", "engine", "server"):
        points.install(place)
    points.wrap(Source, "shards", "leader", "plan")
    chance = random.Random(3)
    for number, fault in enumerate(FAULTS):
        phase = Phase(qwen2, tmp_path / str(number))
        others = (phase.train, phase.offload_and_back, phase.sleep, phase.wake, phase.sync)
        for kind in ("error", "oom", "error"):
            failing = [partial(phase.sync, *each, kind) for each in (fault, chance.choice(FAULTS))]
            anything = [*others, failing[1]]
            for act in (failing[0], *chance.choices(anything, k=3), phase.sync, phase.train, phase.sleep):
                act()
                phase.check()
        phase.real.close()


@pytest.mark.parametrize(("short", "failing", "stays"), [
    ([True, True, True], 0, [False, False, False]),
    ([True, False, False, True, True], 0, [False, False, True, True, False]),
    ([True, True, True, True], 2, [False, False, False, False]),
])  # fmt: skip
@on_ranks(1, timeout=180)
def test_staging_memory_stays(short: list[bool], failing: int, stays: list[bool], qwen2: str, tmp_path: Path) -> None:
    """Plays syncs before which the trainer hands its cache back if room is ``short``; the ``failing`` commit fails.
    Where staging memory ``stays``, both sides have it after that sync, and make no room for it before the next."""
    place, found = OneProcess(qwen2, tmp_path, delivery="staged"), []
    place.manager.keeps_staging = False  # as a manager of an engine that sleeps begins
    for number, tight in enumerate(short, 1):
        asked = list[int]()

        def make(resume: tuple[str, str], release: Any, more: int = 0, tight: bool = tight) -> int | None:
            asked.append(more)  # noqa: B023  (called within this round)
            return 0 if tight and resume[-1] == "awake" else None

        place.adapter._room.make_room = make  # type: ignore[method-assign]
        place.sleep()
        with ExitStack() as stack:
            if number == failing:
                (session,) = loader._sessions.values()
                failure = mock.patch.object(session._load, "finish", side_effect=RuntimeError("injected"))
                stack.enter_context(failure)
                stack.enter_context(pytest.raises(SyncError, match="injected"))
            place.sync()
        assert number == failing or place.model.holds(place.source.weights)
        (session,) = loader._sessions.values()
        found.append((place.manager.sender.staging_bytes > 0, bool(session._stagings), asked[0] > 0))
        place.train()
    place.close()
    to_come = [False, *(not stayed for stayed in stays[:-1])]
    assert found == list(zip(stays, stays, to_come, strict=True)), "both sides alike"


def mapped() -> int:
    """Counts this process's mappings of the trainer's parameters, the trainer's own among them."""
    gc.collect()
    return sum(line.endswith(".memory") for line in Path("/proc/self/maps").read_text().splitlines())


@on_ranks(1, timeout=180)
def test_parameters_are_let_go_of_once_they_are_not_read_in_place(qwen2: str, tmp_path: Path) -> None:
    """Not after a staged sync, nor where some of them cannot be mapped; where nothing can be, a sync fails."""
    place, nothing = OneProcess(qwen2, tmp_path), mock.patch.object(Regions, "map", side_effect=OSError("injected"))
    with nothing, pytest.raises(SyncError, match=r"injected.* one container"):
        place.sync()
    own, honest = mapped(), ParameterLocator.locate

    def half_gone(*args: Any) -> Location:
        location = honest(*args)
        gone = replace(location.regions[-1], key="gone", handle=b"/gone")
        return replace(location, key="half gone", regions=(*location.regions[:-1], gone))

    def private(*_: Any) -> Location:
        raise NotInPlaceError("injected")

    for look, direct in (
        *((honest, number > 0) for number in range(3)),
        (private, False),
        *((honest, True),) * 2,
        *((half_gone, False),) * 2,
    ):
        if look is private:  # after a sync that fails before the trainer says where its parameters lie
            next(iter(loader._sessions.values()))._locations = ()
            with mock.patch("verl_sync_plugin.sync.sender.replace", side_effect=OSError), pytest.raises(SyncError):
                place.sync()
        with mock.patch.object(ParameterLocator, "locate", look):
            place.sync()
        assert place.model.holds(place.source.weights)
        (session,) = loader._sessions.values()
        assert place.manager.report.in_place is direct is bool(session._locations), place.manager.report
        assert look is half_gone or mapped() == (2 * own if direct else own)
    place.close()


READ, HELD = "changed on the way to the engine", "do not hold what was sent of"


@pytest.mark.parametrize(("where", "hashed", "verify", "expected"), [
    ("engine", True, "never", ""),
    ("engine", True, "always", HELD),
    ("trainer", True, "never", READ),
    ("trainer", False, "always", HELD),
    ("trainer", False, "never", ""),
    ("staging", True, "never", READ),
    ("staging", False, "always", HELD),
    ("staging", False, "never", ""),
    ("exchanged", True, "never", READ),
    ("exchanged", False, "always", HELD),
])  # fmt: skip
@on_ranks(1)
def test_a_flip_is_found(where: str, hashed: bool, verify: str, expected: str, qwen2: str, tmp_path: Path) -> None:
    """Flips a bit in a packed slot, in the trainer's memory before the engine reads it, or in the engine's own; or two
    buckets of one tensor change places."""
    delivery, key = ("staged", "staged") if where in ("staging", "exchanged") else ("in place", "auto")
    place = OneProcess(qwen2, tmp_path, verify=verify, delivery=key)
    for _ in range(2):
        place.sync()
    (session,) = loader._sessions.values()
    sender, weights, flipped = place.manager.sender, place.source.weights, list[torch.Tensor]()
    owner, name, memory = {
        "engine": (session._load, "finish", lambda: place.model.c),
        "trainer": (sender, "hash_parameters", lambda: weights["c.q.weight"]),
        "staging": (sender, "pack", lambda: sender._slot(0)),
        "exchanged": (sender, "pack", lambda: sender._slot(len(flipped))),
    }[where]
    honest = getattr(owner, name)

    def flipping(*args: Any) -> Any:
        done = honest(*args)
        if len(flipped) < 1 + (where == "exchanged"):
            flipped.append(memory())
            if where != "exchanged":
                flipped[0].view(torch.uint8).view(-1)[4] ^= 64
            elif len(flipped) == 2:
                torch._foreach_copy_(flipped, [flipped[1].clone(), flipped[0].clone()])
        return done

    unseen = nullcontext() if hashed else reads_unseen()
    fails: Any = pytest.raises(SyncError) if expected else nullcontext()
    with unseen, mock.patch.object(owner, name, flipping), fails as caught:
        place.sync()
    named = "a.weight" if delivery == "staged" else "c.q.weight"
    assert flipped and (not expected or all(words in str(caught.value) for words in (expected, named)))
    assert place.manager.report.delivery == delivery
    place.end_well()
    assert place.manager.report.delivery == delivery


# Stand-ins for what SGLang's quantization method of a module does after a load of a checkpoint
METHODS: dict[str, Callable[[Any], object]] = {
    "the same bytes where they were, as many do": lambda layer: setattr(layer.c, "data", layer.c.data.view(30, 30)),
    "reordered, as experts for Blackwell and AMD": lambda layer: layer.c.copy_(layer.c.flip(0)),
    "moved, in the same order": lambda layer: setattr(layer.c, "data", layer.c.data.clone()),
}


@pytest.mark.parametrize(
    ("method", "verify", "changed"),
    zip(METHODS, ("first", "never", "first"), ("", "SGLang changes c once", "the places of parameters"), strict=True),
)
@on_ranks(1)
def test_weights_rearranged_after_a_load(method: str, verify: str, changed: str, qwen2: str, tmp_path: Path) -> None:
    place = OneProcess(qwen2, tmp_path, verify=verify)
    place.model.quant_method = SimpleNamespace(process_weights_after_loading=METHODS[method])
    for _ in range(2):
        try:
            place.sync()
            assert place.model.holds(place.source.weights) and not changed
        except SyncError as error:
            text = str(error)
            assert changed and all(words in text for words in (changed, "moe_runner_backend=triton", TURN_OFF)), text
    place.close()


@on_ranks(1)
def test_the_cache_goes_back_before_the_trainer_hears_of_the_end(qwen2: str, tmp_path: Path) -> None:
    """Covers a first wait for a word that is as long as trainer ranks wait for each other, since these still plan."""
    place, ends, waits = OneProcess(qwen2, tmp_path), list[str](), list[float]()
    reserved, receive = iter([0, 64 << 20, 0, (64 << 20) - 1]), Channel.receive
    with (
        mock.patch(f"{SESSION}._reserved_bytes", lambda: next(reserved)),
        mock.patch.object(torch.cuda, "empty_cache", lambda: ends.append("emptied")),
        mock.patch(f"{SESSION}.Committed", lambda *args: ends.append("committed") or Committed(*args)),
        mock.patch.object(Channel, "receive", lambda channel, wait: waits.append(wait) or receive(channel, wait)),
    ):
        place.sync()
        place.sync()
    place.close()
    assert ends == ["emptied", "committed", "committed"] and waits.count(agreement_seconds(TIMEOUT)) == 2


@pytest.mark.parametrize(("late", "fails"), [(False, True), (True, True), (True, False)])
@on_ranks(1)
def test_an_engine_that_failed_to_sleep_is_asked_again(late: bool, fails: bool, qwen2: str, tmp_path: Path) -> None:
    """Unless it sleeps by then, after whoever asked had given up. Until it has answered, nothing touches its memory."""
    place, asked = OneProcess(qwen2, tmp_path), list[set[str]]()
    place.sync()
    honest = place.sglang.release_memory_occupation

    async def release(obj: Any, request: None) -> None:
        asked.append(set(obj.tags))
        if len(asked) == 1:
            await asyncio.sleep(0.75 * late)
            if fails:
                raise RuntimeError("injected")
        await honest(obj, request)

    place.server.occupation._timeout = 0.5
    with mock.patch.object(place.sglang, "release_memory_occupation", release):
        with pytest.raises(TimeoutError if late else RuntimeError):
            place.sleep()
        assert place.request() == "a wait"
        for _ in range(2):
            place.sleep()
    assert asked == [TAGS] * (1 + fails) and place.sglang.released == TAGS
    assert place.request() == "a wait"
    place.end_well()


@on_ranks(1)
def test_a_nan_that_was_packed_is_an_error_though_it_is_gone_again(qwen2: str, tmp_path: Path) -> None:
    place = OneProcess(qwen2, tmp_path, delivery="staged")
    part, honest = place.source.weights["b.weight"], place.manager.sender.pack

    def packing(*args: Any) -> None:
        before = part[3].item()
        part[3] = float("nan")
        honest(*args)
        part[3] = before

    said = "parameter 'b.weight' holds NaN or Inf in the trainer"
    with mock.patch.object(place.manager.sender, "pack", packing), pytest.raises(SyncError, match=said):
        place.sync()
    place.end_well()


@pytest.mark.parametrize(("backend", "enabled", "adapter"), [
    ("nccl", True, SyncServerAdapter.stock),
    (SEPARATE_BACKEND, False, SyncServerAdapter.stock),
    (SEPARATE_BACKEND, True, SyncServerAdapter),
])  # fmt: skip
def test_what_verl_moves_itself_is_left_to_verls_adapter(
    backend: str, enabled: bool, adapter: type, qwen2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "1")
    engine, custom = CheckpointEngineConfig(backend=backend), {"sync": {"enabled": enabled}}
    config = RolloutConfig(name="sglang", checkpoint_engine=engine, custom=custom, max_model_len=64)
    assert type(SyncServerAdapter(config, HFModelConfig(path=qwen2), None)) is adapter
