# SPDX-License-Identifier: Apache-2.0
"""The scenarios' bodies; module-level functions, so that spawned processes can import them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from bare_engine import trainer
from bare_engine.scenario import Rank


def three_syncs(member: Rank) -> None:
    """Three syncs with changing weights, each compared bit for bit; the last rank comes late to its listener, and the
    engine stays awake before the second."""
    if member.rank == dist.get_world_size() - 1:
        before(member.manager.meeting, "ask", partial(time.sleep, 1.0))  # its engine rank has connected by then
    order = _order_of(member)
    for version in (1, 2, 3):
        trainer.perturb(member.trainer, seed=version)
        kept = trainer.local_state(member.trainer)
        member.manager.keeps_staging = version == 2
        member.sync(version, awake=version == 2)
        assert all(map(torch.equal, kept, trainer.local_state(member.trainer))), "the sync changed the trainer"
        kept_staging = member.manager.sender.staged, bool(staging_mapped())
        assert kept_staging == (version == 2, version == 2), "both sides keep it, or neither"
        member.check_exact(f"v{version}")
        if version == 1:
            releases = count(member.manager.source, "release")
        if member.endpoint.leader:
            assert order[0] == ("asked" if version == 2 else "plan"), "what is awake comes while the ranks plan"
            assert version == 2 or order.index("pack") < order.index("resumed"), "packed while the engine resumed"
            assert member.endpoint.flushed_behind == int(version >= 2), "only what is all awake behind the load"
        order.clear()
    assert len(releases) == 2, "the sync keeps references to the trainer's parameters"
    _check_report(member)


def staging_mapped() -> list[str]:
    """What this process and the engine's, where it has started them, map of staging memory."""
    me = psutil.Process()
    maps = [path for process in (me, *me.children(recursive=True)) for path in _maps(process.pid)]
    return [path for path in maps if "memfd:verl-sync-" in path]


def _maps(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended
        return []


def _order_of(member: Rank) -> list[str]:
    """Gets "plan", "asked" and "pack" as these begin, and "resumed" when the engine has answered."""
    order: list[str] = []
    resume = member.endpoint.resume

    async def resuming(tags: list[str]) -> None:
        await resume(tags)
        order.append("resumed")

    for owner, method, word in (
        (member.manager, "plan", "plan"),
        (member.manager.sender, "pack", "pack"),
        (member.endpoint, "start_load", "asked"),
    ):
        before(owner, method, partial(order.append, word))
    member.endpoint.resume = resuming  # type: ignore[method-assign]
    return order


def count(owner: Any, method: str) -> list[None]:
    """Gets one more item with each call of a method."""
    calls: list[None] = []
    before(owner, method, partial(calls.append, None))
    return calls


def before(owner: Any, method: str, act: Callable[[], None]) -> None:
    """Does something before each call of a method."""
    honest = getattr(owner, method)

    def acting(*args: Any) -> Any:
        act()
        return honest(*args)

    setattr(owner, method, acting)


def _check_report(member: Rank) -> None:
    report = member.manager.report
    assert report.global_steps == 3 and report.coverage_expected > 10 and report.nbytes > 100_000
    assert report.replayed_tensors == report.tensors, "all are replayed"
    assert 100_000 < report.replayed_bytes <= 2 * report.nbytes
    _check_traffic(member)
    derives = report.not_comparable  # DeepSeek's attention
    assert report.verified_tensors > 20 and report.verified_bytes > 50_000 and derives <= 1, report
    assert {"commit", "plan", "resume_weights", "update_weights", "resume_kv", "pack"} <= report.stages.keys()
    if member.endpoint.leader:
        assert [published["global_steps"] for published in member.endpoint.reports] == [1, 2, 3]
        assert member.endpoint.flushes == 3


def _check_traffic(member: Rank) -> None:
    """Nothing is gathered, and an engine rank reads only what it needs."""
    report, world = member.manager.report, dist.get_world_size()
    read = report.own_bytes + report.peer_bytes
    assert report.gathered_bytes == 0
    if world == 1:
        assert report.peer_bytes == 0
    else:
        assert report.replayed_bytes / world < read < 0.8 * report.replayed_bytes, report
        # Tensor-parallel trainer ranks hold what the engine ranks beside them need, others only by chance
        most = 0.2 if ("tp", world) in member.setup.settings else 0.7
        assert 0 < report.peer_bytes < most * read, report
