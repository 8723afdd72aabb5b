# SPDX-License-Identifier: Apache-2.0
"""Staging memory stays between syncs where there is room for it beside what the engine resumes, and else goes; and how
long an engine rank keeps the trainer's parameters mapped."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from one_process import OneProcess
from worlds import run_world

from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.memory import FIRST, REST
from verl_sync_plugin.rollouts.sglang import loader
from verl_sync_plugin.transport.memory import Live, LiveParameters


def kept(checkpoint: str, folder: str, short: list[bool], failing: int = 0) -> list[tuple[bool, bool, bool]]:
    """Whether, behind each sync, the trainer has staging memory and the engine maps it; and whether before it room was
    made for staging memory that is to come.

    Args:
        short: of each sync, whether the trainer has to hand its cache back before the KV cache is resumed.
        failing: number of a sync whose commit fails in the engine; 0 for none.
    """
    os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1", CUDA_VISIBLE_DEVICES="")
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
        for tensor in place.source.weights.values():
            tensor.add_(1)
    place.close()
    return found


@pytest.mark.parametrize(
    ("short", "failing", "stays"),
    [
        ([True, True, True], 0, [False, False, False]),
        ([True, False, False, True, True], 0, [False, False, True, True, False]),
        ([False, False, True], 0, [False, True, True]),
    ],
)
def test_the_next_sync_does_as_the_room_was(
    short: list[bool], failing: int, stays: list[bool], tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    (found,) = run_world(1, kept, tiny_model("qwen2"), str(tmp_path), short, failing, timeout=180)
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
    os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1", CUDA_VISIBLE_DEVICES="")
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
        in_place._wanted = wanted
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
