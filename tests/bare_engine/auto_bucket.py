# SPDX-License-Identifier: Apache-2.0
"""The story of a bucket size that is chosen in the first sync; played after another one, in the same engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from bare_engine import stories, trainer
from bare_engine.scenario import Rank
from verl_sync_plugin.config.bucket_size import AutoBucket
from verl_sync_plugin.errors import SyncError

GIB = 1 << 30


class Device:
    """80 GiB; the last rank has the least free. Takes note of what the engine held at each reading."""

    def __init__(self, member: Rank) -> None:
        self._member = member
        self._free = 9 * GIB if member.rank == dist.get_world_size() - 1 else 60 * GIB
        self.asleep: list[frozenset[str]] = []

    def read(self) -> tuple[int, int]:
        self.asleep.append(self._member.endpoint._awake.released)
        return self._free, 80 * GIB


def after_three_syncs(member: Rank) -> None:
    """Buckets of a set size first, then a manager that chooses: it fails once, and all ranks come to the same size."""
    stories.three_syncs(member)
    device, fixed = Device(member), member.manager
    fixed.sender.close()
    bucket = AutoBucket(0.0, device.read)
    member.manager = type(fixed)(fixed.engine, member.endpoint, fixed.config, bucket, torch.device("cpu"))
    _fails_to_wake(member)
    device.asleep.clear()
    for version in (3, 2, 1):
        trainer.perturb(member.trainer, version, scale=-0.05)  # ever larger weights would make their rounding show
        member.sync(10 - version)
        report = member.manager.report
        assert report.bucket_bytes == 512 << 20, "the last rank's size; the others alone would take 2048 MiB"
        assert report.buckets == 1 and "of=512MiB" in report.line()
    member.check_exact("auto")
    if member.endpoint.leader:
        assert device.asleep == [{"kv_cache", "weights"}, {"kv_cache"}], "measured once, with the weights back"
        assert member.endpoint.reports[-1]["bucket_bytes"] == 512 << 20
    member.manager.sender.close()


def _fails_to_wake(member: Rank) -> None:
    resume = member.endpoint.resume

    async def broken(tags: list[str]) -> Any:
        raise RuntimeError("injected: cannot resume")

    member.endpoint.resume = broken  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="cannot resume"):
        member.sync(4)
    member.endpoint.resume = resume  # type: ignore[method-assign]
