# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake of the engine's memory by tag."""

from __future__ import annotations

import pytest

from verl_sync_plugin.rollouts.sglang.awake import AwakeState, awake_behind_load, sleep_tags, wake_stages


def test_nothing_is_released_at_first() -> None:
    state = AwakeState()
    assert state.released == frozenset()
    assert state.to_resume(["weights", "kv_cache"]) == []
    assert state.to_release(["kv_cache", "weights"]) == ["kv_cache", "weights"]


def test_each_tag_is_released_and_resumed_once() -> None:
    state = AwakeState()
    state.note_released(["kv_cache", "weights"])
    assert state.to_release(["kv_cache", "weights"]) == []
    assert state.to_resume(["weights"]) == ["weights"]
    state.note_resumed(["weights"])
    assert state.to_resume(["weights", "kv_cache"]) == ["kv_cache"]
    assert state.to_release(["kv_cache", "weights"]) == ["weights"]
    assert state.released == {"kv_cache"}


def test_asking_changes_nothing() -> None:
    state = AwakeState()
    state.to_release(["weights"])
    assert state.released == frozenset()
    state.note_released(["weights"])
    state.to_resume(["weights"])
    assert state.released == {"weights"}


def test_repeated_notes_are_harmless() -> None:
    state = AwakeState()
    state.note_resumed(["weights"])
    state.note_released(["weights"])
    state.note_released(["weights"])
    state.note_resumed(["weights"])
    assert state.released == frozenset()


@pytest.mark.parametrize(
    ("cuda_graph", "keep_weights", "tags"),
    [
        (False, False, ["kv_cache", "weights"]),
        (True, False, ["kv_cache", "weights", "cuda_graph"]),
        (False, True, ["kv_cache"]),
        (True, True, ["kv_cache", "cuda_graph"]),
    ],
)
def test_sleep_tags(cuda_graph: bool, keep_weights: bool, tags: list[str]) -> None:
    assert sleep_tags(cuda_graph, keep_weights) == tags


@pytest.mark.parametrize(
    ("staged", "cuda_graph", "stages"),
    [
        (True, False, (["weights"], ["kv_cache"])),
        (True, True, (["weights"], ["kv_cache", "cuda_graph"])),
        (False, False, (["weights", "kv_cache"], [])),
        (False, True, (["weights", "kv_cache", "cuda_graph"], [])),
    ],
)
def test_wake_stages(staged: bool, cuda_graph: bool, stages: tuple[list[str], list[str]]) -> None:
    assert wake_stages(staged, cuda_graph) == stages


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("cuda_graph", [True, False])
def test_a_wake_undoes_a_sleep(staged: bool, cuda_graph: bool) -> None:
    state = AwakeState()
    state.note_released(state.to_release(sleep_tags(cuda_graph)))
    for tags in wake_stages(staged, cuda_graph):
        state.note_resumed(state.to_resume(tags))
    assert state.released == frozenset()


@pytest.mark.parametrize(
    ("free_cache_engine", "staged", "awake"),
    [(True, True, False), (True, False, True), (False, True, True), (False, False, True)],
)
def test_what_is_all_awake_behind_a_load(free_cache_engine: bool, staged: bool, awake: bool) -> None:
    _, stage_two = wake_stages(staged, cuda_graph=False)
    assert awake_behind_load(free_cache_engine, stage_two) is awake
