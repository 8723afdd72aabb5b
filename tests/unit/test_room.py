# SPDX-License-Identifier: Apache-2.0
"""When the trainer hands its cache back: what the rollout adapter decides with numbers of real devices, and learns."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import torch
from verl.workers.config import RolloutConfig

from verl_sync_plugin.config.settings import SHARES_GPU
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.rollouts import adapter
from verl_sync_plugin.rollouts.sglang.adapter import SyncServerAdapter

GIB = 1 << 30
H200, H100 = 141 * GIB, 80 * GIB
LEARNING = 2  # syncs


class Trainer:
    """A rank of a trainer, and the memory of its device; ``given``: arguments of SGLang, whose estimate else is 0."""

    def __init__(self, patch: pytest.MonkeyPatch, given: dict[str, int] | None = None, **custom: bool) -> None:
        self.free, self.total, self.cached = 60 * GIB, H200, 30 * GIB
        patch.setenv("RANK", "0")
        patch.setenv("RAY_LOCAL_WORLD_SIZE", "1")
        patch.setattr(adapter, "read_device", lambda device: self)
        patch.setattr(adapter, "release_cache", lambda device: self.cached)
        more: dict[str, Any] = {"engine_kwargs": {"sglang": given or {}}, "custom": custom, "max_model_len": 64}
        config = RolloutConfig(name="sglang", multi_stage_wake_up=True, **more)
        model: Any = SimpleNamespace(lora_rank=0, lora={})
        self.adapter: Any = SyncServerAdapter(config, model, Mock())
        if given is None:
            self.adapter._room._estimate = lambda total: 0

    def sync(self, *grown: tuple[int, int], staging: int = 0, activations: int = 0) -> tuple[bool, bool]:
        """Syncs once; ``grown`` is what each rank's engine took. True for each resume before which the cache went."""
        used = [{"asleep": 0, "weights": first, "room": 9, "awake": 9 + rest} for first, rest in grown or [(0, 0)]]
        report = SyncReport(activation_bytes=activations, device_used_bytes=used[0])
        learnt = [{("asleep", "weights"): first, ("room", "awake"): rest} for first, rest in grown]
        manager = self.adapter._manager = Mock(report=report, staging_to_come=staging)
        manager.agreement.attempt = nullcontext
        manager.agreement.gather = lambda what, mine: [mine, *learnt[1:]]
        manager.finish, manager.endpoint.publish = AsyncMock(return_value=report), AsyncMock()
        self.adapter.make_room_for_weights(offloaded=False)
        first = self.adapter._around.emptied_caches
        asyncio.run(self.adapter.make_room_for_rest(lambda: None))
        asyncio.run(self.adapter.end_sync())
        return first > 0, report.emptied_caches > first


@pytest.mark.parametrize(
    ("total", "given", "activations", "reserve"),
    [
        (H200, {}, 0, H200 // 8),
        (H100, {}, 0, 13 * GIB),  # SGLang's estimate for its chunks of 8192 tokens is more than an eighth
        (40 * GIB, {}, 0, 7 * GIB),
        (H100, {"chunked_prefill_size": 2048}, 0, 10 * GIB),
        (H200, {"chunked_prefill_size": 32768}, 0, 49 * GIB),
        (H100, {"chunked_prefill_size": -1}, 0, 25 * GIB),  # not chunked: as long as SGLang lets a prefill be
        # what the engine took: never less than a part, never more than what is estimated
        (H200, None, 1, H200 // 32),
        (H200, None, 3 * GIB, 7 * GIB),
        (H200, None, 40 * GIB, H200 // 8),
    ],
)
def test_reserve(
    total: int, given: dict[str, int] | None, activations: int, reserve: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also an engine that resumes nothing has to generate; the most that it took counts."""
    trainer = Trainer(monkeypatch, given)
    for each in (activations, 0):
        trainer.sync(activations=each)
    for free, cached, goes in ((reserve - 1, GIB, True), (reserve, GIB, False), (0, 0, False)):
        trainer.free, trainer.total, trainer.cached = free, total, cached
        assert trainer.sync() == (goes, goes)


@pytest.mark.parametrize(
    ("learnt", "goes"),
    [
        ([[(8, 40)], [(8, 40)]], (False, False)),
        # In the first sync the engine frees 20 GiB while it resumes, and one rank is asked before it has resumed all
        ([[(8, 25)], [(8, 45)]], (False, True)),
        ([[(8, 45)], [(8, 25)]], (False, True)),
        ([[(8, 45), (8, 1)]] * 2, (False, True)),
        ([[(8, 1), (8, 45)]] * 2, (False, True)),
        ([[(-2, 25)]] * 2, (True, False)),  # nonsense is no knowledge
    ],
)
def test_it_empties_until_it_has_learnt_the_most_of_all_syncs_and_ranks(
    learnt: list[list[tuple[int, int]]], goes: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 GiB are enough for 40 and a reserve of 17.6, and not for 45."""
    trainer = Trainer(monkeypatch)
    for everywhere in learnt:
        assert trainer.sync(*((first * GIB, rest * GIB) for first, rest in everywhere)) == (True, True)
    assert trainer.sync() == goes


def test_then_it_looks_at_the_device_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(monkeypatch)
    for _ in range(LEARNING):
        trainer.sync((8 * GIB, 40 * GIB))
    assert trainer.sync(staging=34 * GIB) == (False, False)
    assert trainer.sync(staging=35 * GIB) == (True, False)
    trainer.free, trainer.cached = 50 * GIB, 40 * GIB  # a longer batch has left more in the cache
    assert trainer.sync() == (False, True)


@pytest.mark.parametrize(("custom", "known"), [({SHARES_GPU: True}, True), ({}, False)])
def test_it_always_empties_when_in_doubt(custom: dict[str, bool], known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(monkeypatch, **custom)
    if not known:
        monkeypatch.setattr(adapter, "read_device", lambda device: None)
    assert [trainer.sync((0, 0)) for _ in range(LEARNING + 1)] == [(True, True)] * (LEARNING + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_cache_goes_whole() -> None:
    device = torch.device("cuda", 0)
    kept = torch.ones(1 << 20, device=device)
    del (gone := [torch.ones(64 << 20, device=device)])[:]
    assert not gone and adapter.release_cache(device) >= 256 << 20
    memory = adapter.read_device(device)
    assert memory is not None and memory.cached < 32 << 20 and kept.sum() == 1 << 20
