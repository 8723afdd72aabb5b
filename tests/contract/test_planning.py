# SPDX-License-Identifier: Apache-2.0
"""The plan of a run between real ranks: agreed once, and again after another plan has failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_lora_adapter import Engine
from worlds import run_world

from contract.sources import WorldSource
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.tensors import Base, Shard, View
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.trainers.base import WirePolicy
from verl_sync_plugin.trainers.megatron.stream import StreamSource
from verl_sync_plugin.transport.agreement import Agreement

CPU = torch.device("cpu")


def shards_of(numel: int) -> list[Shard]:
    base = Base("w", "uint8", 1, (numel, numel), (View("w", (2 * numel,), 0, 2 * numel),))
    return [Shard(base, lambda: torch.zeros(numel, dtype=torch.uint8))]


def fail_in_between() -> tuple[bool, bool]:
    """True if engines hear of the staging memory in use: at first, and after a plan that failed."""
    manager = ShardingManager(None, Engine(), SyncConfig(timeout_seconds=20.0), 4096, CPU)

    def planned(numel: int) -> None:
        manager.source = WorldSource(shards_of(numel))
        manager.plan("1")

    def heard() -> bool:
        return manager.ways.staged._stagings[dist.get_rank()].key == manager.sender.export().key

    planned(64)
    first = heard()

    def refuse(*_: Any) -> None:
        raise SyncError("injected")

    with mock.patch.object(manager.agreement, "same_on_all", refuse), pytest.raises(SyncError, match="injected"):
        planned(4096)  # larger slots: the staging memory would be another one
    with mock.patch.object(manager.sender, "export", refuse), pytest.raises(SyncError, match="injected"):
        planned(4096)
    planned(64)
    return first, heard()


def test_engines_hear_of_the_staging_memory_again_after_a_plan_that_failed() -> None:
    assert run_world(2, fail_in_between, timeout=60) == [(True, True)] * 2


class Streaming(StreamSource):
    """A stream with a collective in it, as Megatron-Bridge's has."""

    def __init__(self) -> None:
        super().__init__(self._streamed, WirePolicy(torch.bfloat16), 20)

    def _streamed(self, afresh: bool) -> Iterator[tuple[str, torch.Tensor]]:
        dist.all_reduce(torch.ones(1))
        yield "w", torch.ones(8)


def fail_before_the_stream() -> str:
    agreement, source = Agreement(20.0), Streaming()
    with agreement.attempt():
        if dist.get_rank() == 1:
            raise RuntimeError("injected: early")
    with pytest.raises(SyncError) as caught:
        source.agree_on_layout(agreement)
        agreement.step("reading the shards", source.shards)
    return str(caught.value)


def test_a_rank_that_failed_early_leaves_nobody_alone_in_the_trainers_stream() -> None:
    (text,) = set(run_world(2, fail_before_the_stream, timeout=30))
    assert "rank 1: RuntimeError: injected: early" in text
