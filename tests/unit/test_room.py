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
    """A rank of a trainer, and the memory of its device."""

    def __init__(self, patch: pytest.MonkeyPatch, **custom: bool) -> None:
        self.free, self.total, self.cached = 60 * GIB, H200, 30 * GIB
        patch.setenv("RANK", "0")
        patch.setenv("RAY_LOCAL_WORLD_SIZE", "1")
        patch.setattr(adapter, "read_device", lambda device: self)
        patch.setattr(adapter, "release_cache", lambda device: self.cached)
        config = RolloutConfig(name="sglang", custom=custom, max_model_len=64)
        model: Any = SimpleNamespace(lora_rank=0, lora={})
        self.adapter: Any = SyncServerAdapter(config, model, Mock())

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


@pytest.mark.parametrize(("total", "activations", "reserve"), [
    # SGLang's own estimate for its chunks of 8192 tokens is 13 GiB, and of 4096 7 GiB
    (H200, 0, H200 // 5), (H100, 0, 16 * GIB), (40 * GIB, 0, 8 * GIB),
    # what the engine took, and never less than a part
    (H200, 1, H200 // 32), (H200, 3 * GIB, 7 * GIB), (H200, 40 * GIB, 81 * GIB),
])  # fmt: skip
def test_reserve(total: int, activations: int, reserve: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an engine that resumes nothing has to generate; the most that it took counts."""
    trainer = Trainer(monkeypatch)
    for each in (activations, 0):
        trainer.sync(activations=each)
    for free, cached, goes in ((reserve - 1, GIB, True), (reserve, GIB, False), (0, 0, False)):
        trainer.free, trainer.total, trainer.cached = free, total, cached
        assert trainer.sync() == (goes, goes)


@pytest.mark.parametrize(("learnt", "goes"), [
    ([[(8, 30)], [(8, 30)]], (False, False)), ([[(-2, 25)]] * 2, (True, False)),  # nonsense is no knowledge
    # In the first sync the engine frees 20 GiB while it resumes, and one rank is asked before it has resumed all
    ([[(8, 25)], [(8, 45)]], (False, True)), ([[(8, 45)], [(8, 25)]], (False, True)),
    ([[(8, 45), (8, 1)]] * 2, (False, True)), ([[(8, 1), (8, 45)]] * 2, (False, True)),
])  # fmt: skip
def test_it_empties_until_it_has_learnt_the_most_of_all_syncs_and_ranks(
    learnt: list[list[tuple[int, int]]], goes: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 GiB are enough for 30 and a reserve of 28.2, and not for 45."""
    trainer = Trainer(monkeypatch)
    for everywhere in learnt:
        assert trainer.sync(*((first * GIB, rest * GIB) for first, rest in everywhere)) == (True, True)
    assert trainer.sync() == goes


def test_then_it_looks_at_the_device_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(monkeypatch)
    for _ in range(LEARNING):
        trainer.sync((8 * GIB, 30 * GIB))
    assert trainer.sync(staging=23 * GIB) == (False, False)
    assert trainer.sync(staging=24 * GIB) == (True, False)
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
