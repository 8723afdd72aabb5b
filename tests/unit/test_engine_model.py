# SPDX-License-Identifier: Apache-2.0
"""The receiver knows an engine by ``EngineModel`` alone: it syncs a model of no engine, over a real channel and real
staging memory, by an implementation that is not SGLang's."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from verl_sync_plugin.engine.model import EngineModel
from verl_sync_plugin.engine.session import ReceiverSession
from verl_sync_plugin.layout.load_map import owners_of, read_parts, unwritten
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, Plan, Shard, View
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.transport.channel import Listener, connect
from verl_sync_plugin.transport.protocol import (
    Committed,
    Hello,
    LoadRequest,
    Ready,
)

CPU, WAIT = torch.device("cpu"), 30.0
SHAPE = (16, 32)
NAMES = ("x.between.weight", "x.left.weight", "x.right.weight", "x.unused.weight")
BETWEEN, LEFT, RIGHT, UNUSED = NAMES
Tensors = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    """Fuses two tensors, which it must be given together, and computes something from a third."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(2 * SHAPE[0], SHAPE[1]))
        self.between = torch.nn.Parameter(torch.zeros(SHAPE))
        self.doubled = torch.zeros(SHAPE)
        self.loads = 0

    def take(self, given: Tensors) -> None:
        """A load that has nothing of SGLang's, not even its name."""
        self.loads += 1
        assert (LEFT in given) == (RIGHT in given), "half of a pair"
        if LEFT in given:
            self.fused.data[: SHAPE[0]].copy_(given[LEFT])
            self.fused.data[SHAPE[0] :].copy_(given[RIGHT])
        if BETWEEN in given:
            self.between.data.copy_(given[BETWEEN])
            self.double()

    def double(self) -> None:
        self.doubled = self.between.data * 2


class Engine(EngineModel):
    """What another engine would implement.

    Attributes:
        places: stands for what an engine may move behind its parameters' backs.
    """

    engine = "Another"
    fused_pairs = (("left.weight", "right.weight"),)
    module: Model
    places = 0

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.module.take(dict(tensors))

    @property
    def can_derive(self) -> bool:
        return True

    def derive_after_load(self) -> None:
        self.module.double()

    def layout_token(self) -> tuple[object, ...]:
        return (self.places,)

    def why_skipped(self, name: str) -> str:
        return "nobody needs it" if name == UNUSED else ""


class Trainer:
    """One trainer rank beside one engine rank, whose session runs in a thread for every sync."""

    def __init__(self, model: EngineModel) -> None:
        self._session = ReceiverSession(model)
        self._listener, self._sender = Listener(WAIT), BucketSender(CPU, WAIT)
        numel = SHAPE[0] * SHAPE[1]
        bases = (
            Base(name, "float32", 4, (numel,), (View(name, SHAPE, 0, numel),))
            for name in (LEFT, BETWEEN, RIGHT, UNUSED)
        )
        self.plan: Plan = plan_buckets(tuple(bases), 3 * numel)  # every tensor is torn, and no pair in one bucket
        self._sender.reserve(self.plan)

    def sync(self, tensors: Tensors) -> tuple[Ready, Committed]:
        """One sync; what the engine rank said at its begin and at its end."""
        shards = [Shard(base, partial(tensors[base.key].flatten)) for base in self.plan.bases]
        hello = Hello("1", self.plan.digest, (self._sender.export(),), tells=True)
        self._sender.begin(self.plan, 0)
        with self._engine_in_thread():
            greeting = self._sender.greet(hello, self.plan)
            for index in range(len(self.plan.buckets)):
                self._sender.pack(index, 0, shards)
                self._sender.load(index, 0)
                self._sender.wait_loaded(index)
            committed = self._sender.commit()
            self._sender.hang_up()
        assert greeting.map is not None
        entries = [bucket.entries for bucket in self.plan.buckets]
        numbers = [number for number, _ in read_parts(greeting.map, entries, owners_of(entries))]
        read = torch.zeros(len(NAMES), dtype=torch.int64)
        read.index_add_(0, torch.tensor(numbers), torch.frombuffer(bytearray(committed.sums), dtype=torch.int64))
        # Nobody reads the last tensor
        assert torch.equal(self._sender.sums(self.plan)[:-1], read[:-1]), "bytes changed on the way"
        return greeting, committed

    @contextmanager
    def _engine_in_thread(self) -> Iterator[None]:
        request = LoadRequest("1", (self._listener.address,), WAIT)
        channel = connect(self._listener.address, WAIT, WAIT)
        accepted = self._listener.accept(WAIT)
        assert accepted is not None
        self._sender.adopt(accepted)
        thread = threading.Thread(target=self._session.run, args=(channel, request))
        thread.start()
        try:
            yield
        finally:
            self._sender.hang_up()
            thread.join(WAIT)
            channel.close()

    def close(self) -> None:
        self._sender.close()
        self._listener.close()


@pytest.fixture
def made() -> Iterator[tuple[Engine, Trainer]]:
    engine = Engine(Model(), 0)
    trainer = Trainer(engine)
    yield engine, trainer
    trainer.close()


def some(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SHAPE, generator=generator) for name in NAMES}


def assert_holds(model: Model, tensors: Tensors) -> None:
    assert torch.equal(model.fused, torch.cat((tensors[LEFT], tensors[RIGHT])))
    assert torch.equal(model.between, tensors[BETWEEN]) and torch.equal(model.doubled, tensors[BETWEEN] * 2)


def test_another_engines_model_is_synced(made: tuple[Engine, Trainer]) -> None:
    engine, trainer = made
    for seed in range(3):
        before = engine.module.loads
        greeting, committed = trainer.sync(some(seed))
        assert_holds(engine.module, some(seed))
        assert greeting.map is not None and greeting.map.kept == 2 and not unwritten(greeting.map)
        assert committed.replayed_tensors == len(NAMES) and committed.map is None
        assert (engine.module.loads > before) == (seed == 0), "a later sync does not call the model's own load"
    assert engine.name == "Model" and greeting.map.model == "Another's Model" and greeting.map.derives


def test_what_the_engine_moves_starts_over(made: tuple[Engine, Trainer]) -> None:
    engine, trainer = made
    loads = []
    for seed in range(4):
        engine.places, before = int(seed > 1), engine.module.loads
        trainer.sync(some(seed))
        loads.append(engine.module.loads > before)
        assert_holds(engine.module, some(seed))
    assert loads == [True, False, True, False]


def test_what_cannot_be_derived_again_is_loaded_by_the_model(
    made: tuple[Engine, Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, trainer = made
    monkeypatch.setattr(Engine, "can_derive", False)
    for seed in range(3):
        greeting, committed = trainer.sync(some(seed))
        assert committed.replayed_tensors == 3 and greeting.map is not None
        assert [left.why for left in greeting.map.left] == ["its load computes from it"]
        assert_holds(engine.module, some(seed))


@pytest.mark.parametrize("skips", [True, False])
def test_what_it_leaves_out_is_told_unless_it_may(
    skips: bool, made: tuple[Engine, Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, trainer = made
    if not skips:
        monkeypatch.setattr(Engine, "why_skipped", EngineModel.why_skipped)
    found = trainer.sync(some(0))[0].map
    assert found is not None and found.skipped == (((NAMES.index(UNUSED), "nobody needs it"),) if skips else ())
