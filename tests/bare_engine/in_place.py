# SPDX-License-Identifier: Apache-2.0
"""Parameters in memory that the engine can map: from the second sync on it reads them where they lie, and finds every
bit that flips on that way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from bare_engine import direct_flips, stories, trainer
from bare_engine.scenario import Rank
from verl_sync_plugin.transport.memory import Live, LiveParameters


def read_in_place(member: Rank) -> None:
    """Staged once, then read in place; parameters that move, cannot be mapped or cannot be shared any more."""
    manager = member.manager
    trainer.share(member.trainer, member.folder)
    _synced(member, 1, in_place=False)
    packs = stories.count(manager.sender, "pack")
    _synced(member, 2, in_place=True)
    assert not packs and not manager.sender.staged, "staging memory is given back"
    known = manager.ways.in_place.known
    _synced(member, 3, in_place=True, awake=True)
    direct_flips.are_found(member)
    assert manager.ways.in_place.known == known, "said once"

    trainer.share(member.trainer, member.folder)
    _synced(member, 4, in_place=True)
    assert manager.ways.in_place.known != known, "what moved is said again"

    _spoil_next_regions(member)
    trainer.share(member.trainer, member.folder)
    _synced(member, 5, in_place=False)  # the engine cannot map what it is told of: the same sync is staged
    assert packs and not manager.sender.staged
    _synced(member, 6, in_place=False)  # and it says so from then on


def _synced(member: Rank, version: int, in_place: bool, awake: bool = False) -> None:
    trainer.perturb(member.trainer, seed=version)
    before = trainer.local_state(member.trainer)
    member.sync(version, awake)
    assert all(map(torch.equal, before, trainer.local_state(member.trainer))), "the sync changed the trainer"
    report, world = member.manager.report, dist.get_world_size()
    assert (report.direct_bytes > 0) == in_place, (version, report)
    if in_place:
        assert report.direct_bytes == report.own_bytes + report.peer_bytes
        assert report.replayed_tensors == report.tensors and (report.peer_bytes > 0) == (world > 1)
    member.check_exact(f"v{version}")


def _spoil_next_regions(member: Rank) -> None:
    """The last rank tells of memory that is not there."""
    honest = LiveParameters.look

    def spoiled(*args: Any) -> Live:
        live = honest(*args)
        if member.rank != dist.get_world_size() - 1:
            return live
        gone = tuple(replace(region, key=f"gone-{region.key}", handle=("/gone",)) for region in live.regions)
        return replace(live, key=f"gone-{live.key}", regions=gone)

    LiveParameters.look = spoiled  # type: ignore[method-assign]
