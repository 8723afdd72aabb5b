# SPDX-License-Identifier: Apache-2.0
"""Checks what a trainer makes of load maps: what it refuses before anything is sent, and which syncs it verifies."""

from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from receiving import comparison_of

from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.load_map import Box, LoadMap, Move, StateTensor, Storage
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, Plan, View
from verl_sync_plugin.transport.protocol import Committed
from verl_sync_plugin.verify import DERIVED, Cadence

NUMEL = 64
WHOLE = Box(0, 0, ((NUMEL, 1, 1),))


def plan_of(*names: str) -> Plan:
    bases = [Base(name, "bfloat16", 2, (NUMEL,), (View(name, (NUMEL,), 0, NUMEL),)) for name in names]
    return plan_buckets(tuple(bases), 1 << 20)


PLAN = plan_of("a", "b")
learned = partial(comparison_of, plan=PLAN)
COMPLETE = LoadMap(
    "SGLang's Model", storages=tuple(Storage(n, (StateTensor(n, "bfloat16", WHOLE, False),)) for n in ("x", "y")),
    moves=tuple(Move(n, n, "bfloat16", WHOLE) for n in range(2)),
)  # fmt: skip


def with_one_more(buffer: bool, name: str = "model.normalizer") -> LoadMap:
    more = Storage(name, (StateTensor(name, "bfloat16", Box(0, 0, ((4, 1, 1),)), buffer),))
    return msgspec.structs.replace(COMPLETE, storages=(*COMPLETE.storages, more))


IN_PART = msgspec.structs.replace(with_one_more(True), moves=(*COMPLETE.moves, Move(1, 2, "bfloat16", Box(0, 0))))


@pytest.mark.parametrize(("found", "known", "text"), [
    # real weights are no excuse for a parameter, nor for what is sent
    (with_one_more(False, "lm_head.weight"), {}, r"leaves 1 of 3 .*in part: lm_head.weight \(0 of 4 elem"),
    (with_one_more(True, "a"), {}, r"leaves 1 of 3 .*in part: a \(0 of 4 elem"),
    (IN_PART, {}, r"in part: model\.normalizer \(1 of 4 elements\)"),
    (with_one_more(True), {"restores": False}, r"load_format=dummy: .*unwritten: model\.normalizer "),
])  # fmt: skip
def test_what_is_left_unwritten_is_named(found: LoadMap, known: dict[str, Any], text: str) -> None:
    with pytest.raises(SyncError, match=text):
        learned(found, **known)


def test_a_map_that_explains_everything_and_constants_left_to_a_host_copy(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = learned(COMPLETE)
    assert comparison.knows(PLAN) and comparison.compared == (0, 1) and not comparison.left_out
    comparison.note(COMPLETE)
    assert not comparison.knows(PLAN), "what an engine rank says is exchanged"
    comparison = learned(with_one_more(buffer=True))
    assert [kept.name for kept, *_ in comparison.unwritten] == ["model.normalizer"]
    assert "model.normalizer (0 of 4 elements); the engine keeps what it loaded at its start" in capsys.readouterr().out


def test_every_reason_is_said_however_many_tensors_have_another(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"norm{number}" for number in range(9)] + ["odd"]
    moves = tuple(Move(n, 0, "bfloat16", WHOLE) for n in range(10))
    why = (*((n, "is computed") for n in range(9)), (9, "lies elsewhere"))
    found = LoadMap(storages=(Storage("x", ()),), moves=moves, unplaced=why, derives=True)
    comparison = learned(found, plan=plan_of(*names))
    said = capsys.readouterr().out
    assert "norm4 and 5 more (is computed)" in said and "not comparable: odd (lies elsewhere)" in said
    assert comparison.left_out[DERIVED] == "is computed" and not comparison.compared


@pytest.mark.parametrize("verify", ["always", 10])
def test_syncs_of_which_nothing_can_be_compared_are_not_called_verified(verify: str | int) -> None:
    nothing = msgspec.structs.replace(COMPLETE, unplaced=((0, "its load lays b out again"), (1, "too")))
    with pytest.raises(SyncError, match=rf"verify={verify}, but nothing .* compared: a \(its load lays"):
        learned(nothing, verify=verify)
    learned(nothing)
    learned(COMPLETE, verify=verify)


def test_an_engine_rank_that_hashes_something_else_is_an_error() -> None:
    committed = Committed(sums=np.array([7, -3, 1], dtype="<i8").tobytes())
    with pytest.raises(ValueError, match="hashed 3 parts of tensors, and its map has 2"):
        learned(COMPLETE).weighed(torch.tensor([7, -3]), committed, False)


@pytest.mark.parametrize(
    ("verify", "due"), [("never", ""), ("always", "123456"), ("first", "123"), (1, "123456"), (2, "135"), (3, "14")]
)
def test_which_syncs_are_verified(verify: str | int, due: str) -> None:
    cadence, found = Cadence(verify), ""
    for number in range(1, 7):
        found += str(number) * cadence.due("plan")
        assert cadence.due("plan") == cadence.due("plan"), "a sync that fails is not counted"
        cadence.note("plan")
    assert found == due
    cadence.note("plan", restarts=True)
    assert cadence.due("plan") == (verify != "never"), "a new load map is proven again"
    assert cadence.due("another") == (verify != "never"), "every plan has its own"
