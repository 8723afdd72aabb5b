# SPDX-License-Identifier: Apache-2.0
"""When the trainer hands its cache back: the decision with numbers of real devices, and what a run learns."""

from __future__ import annotations

import gc

import pytest
import torch

from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.room import (
    FIRST,
    LEARNING_SYNCS,
    REST,
    DeviceMemory,
    Room,
    growth,
    no_collection,
    read_device,
    release_cache,
)

GIB = 1 << 30
H200 = 141 * GIB


def unknown(total: int) -> int:
    """The estimate of an engine that makes none."""
    return 0


@pytest.mark.parametrize(
    ("total", "given", "measured", "reserve"),
    [
        (141 * GIB, {}, 0, 141 * GIB // 8),
        (80 * GIB, {}, 0, 13 * GIB),  # SGLang's estimate for its chunks of 8192 tokens is more than an eighth
        (40 * GIB, {}, 0, 7 * GIB),
        (80 * GIB, {"chunked_prefill_size": 2048}, 0, 10 * GIB),
        (141 * GIB, {"chunked_prefill_size": 32768}, 0, 49 * GIB),
        (80 * GIB, {"chunked_prefill_size": -1}, 0, 25 * GIB),  # not chunked: as long as SGLang lets a prefill be
        # what the engine took: never less than a part, never more than what is estimated
        (H200, None, 1, H200 // 32),
        (H200, None, 3 * GIB, 7 * GIB),
        (H200, None, 40 * GIB, H200 // 8),
    ],
)
def test_reserve(total: int, given: dict[str, int] | None, measured: int, reserve: int) -> None:
    estimate = unknown if given is None else rollout_of("sglang").generating_bytes({"engine_kwargs": {"sglang": given}})
    # an engine that resumes nothing still has to generate
    for free, cached, went in ((reserve - 1, GIB, GIB), (reserve, GIB, None), (0, 0, None)):
        memory = DeviceMemory(free, total, cached)
        room = Room(lambda memory=memory: memory, estimate)  # type: ignore[misc]
        room.note_activations(measured)
        room.note_activations(0)  # the most counts
        for _ in range(LEARNING_SYNCS):
            room.learn([{REST: 0}])
        assert room.make(REST, lambda: GIB) == went


def test_unknown_memory_is_emptied() -> None:
    cpu = torch.device("cpu")
    assert read_device(cpu) is None and release_cache(cpu) == 0
    room = Room(lambda: None, unknown)
    for _ in range(LEARNING_SYNCS + 1):
        assert room.make(FIRST, lambda: GIB) == GIB
        room.learn([{FIRST: 0}])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_cache_goes_whole() -> None:
    device = torch.device("cuda", 0)
    kept = torch.ones(1 << 20, device=device)
    del (gone := [torch.ones(64 << 20, device=device)])[:]
    assert not gone and release_cache(device) >= 256 << 20
    memory = read_device(device)
    assert memory is not None and memory.cached < 32 << 20 and kept.sum() == 1 << 20


def test_growth_is_what_each_resume_added() -> None:
    used = {"asleep": 30, "weights": 38, "synced": 39, "room": 25, "awake": 65}
    assert growth(used) == {FIRST: 8, REST: 40}
    assert growth({"asleep": 30, "room": 25, "awake": 65}) == {REST: 40}
    assert growth({}) == {}


class Trainer:
    """A rank whose device has 60 GiB free and 30 GiB cached."""

    def __init__(self, always: bool = False) -> None:
        self.memory = DeviceMemory(60 * GIB, H200, 30 * GIB)
        self.room = Room(lambda: self.memory, unknown, always)

    def empties(self, resume: tuple[str, str], more: int = 0) -> bool:
        """True if the cache goes for a resume, in the present state of the device."""
        went = self.room.make(resume, lambda: self.memory.cached, more)
        assert went in (None, self.memory.cached)
        return went is not None


def test_it_empties_until_it_has_learnt_and_then_looks_at_the_device_every_time() -> None:
    trainer, always = Trainer(), Trainer(always=True)
    for _ in range(LEARNING_SYNCS):
        assert trainer.room.learning and trainer.empties(FIRST) and trainer.empties(REST)
        trainer.room.learn([{FIRST: 8 * GIB, REST: 40 * GIB}])
        always.room.learn([{FIRST: 0, REST: 0}])
    assert not trainer.room.learning and not trainer.empties(FIRST) and not trainer.empties(REST)
    assert not trainer.empties(FIRST, more=34 * GIB)
    assert trainer.empties(FIRST, more=35 * GIB), "60 GiB are not enough for 43 and a reserve of 17.6"
    assert always.empties(FIRST) and always.empties(REST)
    trainer.memory = DeviceMemory(50 * GIB, H200, 40 * GIB)  # a longer batch has left more in the cache
    assert trainer.empties(REST) and not trainer.empties(FIRST)


@pytest.mark.parametrize(
    "learnt",
    [
        [[{FIRST: 8 * GIB, REST: 25 * GIB}], [{FIRST: 8 * GIB, REST: 45 * GIB}]],
        [[{FIRST: 8 * GIB, REST: 45 * GIB}], [{FIRST: 8 * GIB, REST: 25 * GIB}]],
        [[{FIRST: 8 * GIB, REST: 45 * GIB}, {FIRST: 8 * GIB, REST: 1 * GIB}]] * 2,
        [[{FIRST: -2 * GIB, REST: 25 * GIB}]] * 2,  # nonsense is no knowledge
    ],
)
def test_the_most_of_all_syncs_and_ranks_counts(learnt: list[list[dict[tuple[str, str], int]]]) -> None:
    """In the first sync the engine frees 20 GiB while it resumes, and one rank is asked before it has resumed all."""
    trainer = Trainer()
    for everywhere in learnt:
        trainer.room.learn(everywhere)
    known = learnt[0][0][FIRST] > 0
    assert trainer.empties(REST) is known, "60 GiB are not enough for 45 and a reserve of 17.6"
    assert trainer.empties(FIRST) is not known


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_in_a_sync_and_as_before_after_it(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), no_collection():
            with no_collection():
                pass
            assert not gc.isenabled(), "the inner one does not end the outer one"
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
