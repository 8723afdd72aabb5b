# SPDX-License-Identifier: Apache-2.0
"""A real SGLang engine fed by verl's real FSDP and Megatron engines: exact after every sync, staged or in place."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import unmeasured
from bare_engine import trainer
from bare_engine.scenario import Rank, Setup, run_rank
from megatron_cpu import checkpoints
from megatron_cpu.engines import megatron_environment
from ports import free_port
from verl_sync_plugin.transport.memory import Live, LiveParameters

pytestmark = pytest.mark.slow


def story(member: Rank) -> None:
    """Staged once, then read where the parameters lie; they move, and in the end they cannot be mapped any more. The
    last rank comes late to its first meeting, and the engine stays awake before the third sync."""
    manager, last = member.manager, member.rank == dist.get_world_size() - 1
    honest, look = manager.meeting.ask, LiveParameters.look
    trainer.share(member.trainer, member.folder)

    def late() -> None:
        manager.meeting.ask = honest  # type: ignore[method-assign]
        time.sleep(1.0 if last else 0.0)  # its engine rank has connected by then
        honest()

    manager.meeting.ask = late  # type: ignore[method-assign]
    synced(member, 1, in_place=False)
    packed_while_the_engine_resumed(member)
    synced(member, 2, in_place=True)
    assert not manager.sender.staged, "staging memory is given back"
    synced(member, 3, in_place=True, awake=True)
    trainer.share(member.trainer, member.folder)
    synced(member, 4, in_place=True)
    trainer.share(member.trainer, member.folder)
    with mock.patch.object(LiveParameters, "look", gone(look) if last else look):
        synced(member, 5, in_place=False)  # the engine cannot map this memory: the same sync is staged
        assert not manager.sender.staged
        synced(member, 6, in_place=False)  # and it says so from then on
    check_report(member)


def synced(member: Rank, version: int, in_place: bool, awake: bool = False) -> None:
    """A sync of other weights than before: it leaves the trainer as it is, and the engine is exact."""
    trainer.perturb(member.trainer, seed=version)
    before = trainer.local_state(member.trainer)
    member.sync(version, awake)
    assert all(map(torch.equal, before, trainer.local_state(member.trainer))), "the sync changed the trainer"
    member.check_exact(f"v{version}")
    report, world = member.manager.report, dist.get_world_size()
    assert (report.direct_bytes > 0) == in_place, (version, report)
    if in_place:
        assert report.direct_bytes == report.own_bytes + report.peer_bytes
        assert report.replayed_tensors == report.tensors and (report.peer_bytes > 0) == (world > 1)
    if member.engine is not None:
        assert member.engine.flushed[-1] == awake, "only what is all awake is flushed after the load"


def packed_while_the_engine_resumed(member: Rank) -> None:
    if member.engine is not None:
        spans = member.manager.report.spans
        packed = min(start for stage, start, _ in spans if stage == "pack")
        assert packed < max(start + took for stage, start, took in spans if stage == "resume_weights")


def check_report(member: Rank) -> None:
    """Nothing is gathered, and an engine rank reads only what it needs."""
    report, world = member.manager.report, dist.get_world_size()
    assert report.global_steps == 6 and report.coverage_expected > 10 and report.nbytes > 100_000
    assert report.replayed_tensors == report.tensors, "all are replayed"
    derives = report.not_comparable  # DeepSeek's attention
    assert report.verified_tensors > 20 and derives <= 1, report
    assert {"commit", "plan", "resume_weights", "update_weights", "resume_kv", "pack"} <= report.stages.keys()
    if member.engine is not None:
        assert [published["global_steps"] for published in member.engine.reports] == [1, 2, 3, 4, 5, 6]
    assert report.gathered_bytes == 0 and (report.peer_bytes > 0) == (world > 1)
    if world > 1:
        read = report.own_bytes + report.peer_bytes
        plan = member.manager.planned
        assert plan is not None
        weights = sum({entry.name: entry.nbytes for bucket in plan.buckets for entry in bucket.entries}.values())
        assert weights / world < read < 0.8 * weights, report
        # Tensor-parallel trainer ranks hold what the engine ranks next to them need, others only by chance
        most = 0.2 if ("tp", world) in member.setup.settings else 0.7
        assert report.peer_bytes < most * read, report


def gone(honest: Callable[..., Live]) -> Callable[..., Live]:
    """Tells of memory that is not there."""

    def look(*args: Any) -> Live:
        live = honest(*args)
        regions = tuple(replace(region, key=f"gone-{region.key}", handle=("/gone",)) for region in live.regions)
        return replace(live, key=f"gone-{live.key}", regions=regions)

    return look


# Kind of model, strategy, ranks, bytes of a bucket, settings; in ``make test`` the first two
CASES: dict[str, tuple[str, str, int, int, tuple[tuple[str, object], ...]]] = {
    # routers that travel in float32, and experts that are views of one parameter
    "moe": ("qwen3-moe", "fsdp2", 2, 40_000, ()),
    # what travels as single experts is one parameter in the engine
    "moe-megatron-ep2": ("qwen3-moe", "megatron", 2, 60_000, (("ep", 2),)),
    "tied": ("qwen2-tied", "fsdp2", 1, 1 << 20, ()),
    "fsdp1-tp2": ("llama", "fsdp", 2, 60_000, ()),
    "megatron-tp2": ("qwen2", "megatron", 2, 20_000, (("tp", 2),)),
    # of latent attention's kv_b_proj the engine keeps two products
    "deepseek-megatron-ep2": ("deepseek", "megatron", 2, 60_000, (("ep", 2),)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extended if at > 1 else ()) for at, name in enumerate(CASES)]
)
def test_engine_equals_disk_load(name: str, tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    kind, strategy, world, bucket_bytes, settings = CASES[name]
    made = kind in ("qwen3-moe", "deepseek")
    path = checkpoints.write(kind, tmp_path / "model", **checkpoints.FOR_SGLANG) if made else tiny_model(kind)
    setup = Setup(path, strategy, world, bucket_bytes, settings)
    megatron = megatron_environment() if strategy == "megatron" else nullcontext()
    with megatron, unmeasured.children():
        mp.spawn(run_rank, args=(setup, str(tmp_path), free_port(), story), nprocs=world)
