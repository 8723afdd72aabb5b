# SPDX-License-Identifier: Apache-2.0
"""The receiver knows an engine by ``EngineModel`` alone: it syncs a model of no engine, by an implementation that is
not SGLang's."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from receiving import Sender, Tensors

from verl_sync_plugin.engine.model import EngineModel
from verl_sync_plugin.layout.load_map import unwritten

SHAPE = (16, 32)
NAMES = BETWEEN, LEFT, RIGHT, UNUSED = ("x.between.weight", "x.left.weight", "x.right.weight", "x.unused.weight")


class Model(torch.nn.Module):
    """Fuses two tensors, which it must be given together, and computes something from a third."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(2 * SHAPE[0], SHAPE[1]).bfloat16(), False)
        self.between = torch.nn.Parameter(torch.zeros(SHAPE).bfloat16(), False)
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
    """Acts as another engine; ``places`` stands for what it may move without the receiver's knowledge."""

    engine = "Another"
    fused_pairs = (("left.weight", "right.weight"),)
    module: Model
    can_derive = True
    places = 0
    skips = "nobody needs it"

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.module.take(dict(tensors))

    def derive_after_load(self) -> None:
        self.module.double()

    def layout_token(self) -> tuple[object, ...]:
        return (self.places,)

    def why_skipped(self, name: str) -> str:
        return self.skips if name == UNUSED else ""


@pytest.mark.parametrize("derives", [True, False])
def test_another_engines_model_is_synced(derives: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "can_derive", derives)
    engine = Engine(Model(), 0)
    sender = Sender([(LEFT,), (BETWEEN,), (RIGHT,), (UNUSED,)], SHAPE, 400)  # every tensor torn, no pair in one bucket
    load, loaded = sender.receiver(engine), list[bool]()
    for seed in range(4):
        engine.places, before = int(seed > 1), engine.module.loads
        sent = sender.train(seed)
        sender.staged(load)
        loaded.append(engine.module.loads > before)
        assert torch.equal(engine.module.fused, torch.cat((sent[LEFT], sent[RIGHT])))
        assert torch.equal(engine.module.between, sent[BETWEEN])
        assert torch.equal(engine.module.doubled, sent[BETWEEN] * 2)
        assert sender.compared(load) >= {LEFT, RIGHT}
        assert load.map.kept == 2 and not unwritten(load.map) and load.map.derives is derives
        assert load.map.skipped == ((NAMES.index(UNUSED), "nobody needs it"),)
        assert load.replayed == len(NAMES) - (not derives)
        assert [left.why for left in load.map.left] == ["its load computes from it"] * (not derives)
    assert loaded == ([True, False, True, False] if derives else [True] * 4), "a steady sync has no load of the model's"
    assert load.map.model == "Another's Model"


def test_what_it_may_not_leave_out_is_not_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "skips", "")
    sender = Sender([(name,) for name in NAMES], SHAPE)
    load = sender.receiver(Engine(Model(), 0))
    sender.staged(load)
    assert load.map.skipped == ()
