# SPDX-License-Identifier: Apache-2.0
"""Two trainer ranks and real SGLang engines that share nothing with them: exact, also when engines come and go."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from separate.driver import Driver, Failure, Member, exact, failed_alike, members, none_failed, together
from separate.processes import TIMEOUT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PACK, READ = "engine._manager.sender.pack", "engine._manager.sender.hash_parameters"  # of a trainer rank


@pytest.fixture
def model(tiny_model: Callable[[str], str]) -> str:
    return tiny_model("qwen2")


def test_syncs_are_exact_while_engines_join_leave_fail_and_die(model: str, tmp_path: Path) -> None:
    with members(model, 3) as (driver, rollouts):
        equal_and_other_weights(driver, rollouts[:2], tmp_path)
        come_and_go(driver, rollouts, tmp_path)
        fail_and_die(driver, rollouts[1:], tmp_path)


def lie(driver: Driver, rollouts: list[Member], hosts: str) -> None:
    """From the next group on all ranks are on hosts of these names, a letter for each."""
    for member, host in zip((*driver.trainers, *rollouts), hosts, strict=True):
        assert member.ask("place", host).answer() is None


def came_once(driver: Driver, rollouts: list[Member], hosts: str) -> None:
    """After the first sync of a group: every trainer rank's segments have come to every other rank, each once. What
    counts as having crossed the network is, for every rank, all that trainer ranks on other hosts have sent."""
    for rank, member in enumerate((*driver.trainers, *rollouts)):
        came, report = member.ask("came").answer()
        assert came == {sender: report["nbytes"] // 2 for sender in range(2) if sender != rank}, (rank, hosts)
        assert report["network_bytes"] == sum(came[sender] for sender in came if hosts[sender] != hosts[rank])


def equal_and_other_weights(driver: Driver, rollouts: list[Member], tmp_path: Path) -> None:
    first, second = rollouts
    lie(driver, [first, second], "abab")
    together(driver.trainers, "train", 1)
    none_failed(driver.sync(1, [first, second]))
    came_once(driver, [first, second], "abab")
    words = together([first, second], "generate")
    assert words[0] == words[1]
    exact(driver, [first, second], tmp_path / "v1")

    # equal weights: the same words
    report = driver.sync(2, [first, second])[2]
    assert together([first, second], "generate") == words
    assert report["manager"] == "SeparateRollout" and report["global_steps"] == 2
    assert report["replayed_tensors"] == report["tensors"] and report["buckets"] > 3
    assert report["own_bytes"] > 0 == report["peer_bytes"], "each engine rank reads what was sent to its rollout rank"

    # after a step of training: others
    together(driver.trainers, "train", 3)
    none_failed(driver.sync(3, [first, second]))
    assert together([first, second], "generate") != words
    exact(driver, [first, second], tmp_path / "v3")


def come_and_go(driver: Driver, rollouts: list[Member], tmp_path: Path) -> None:
    first, second, third = rollouts
    # one more cannot join, which all hear of at once
    assert third.ask("break_next", "receiver._make").answer() is None
    before = time.monotonic()
    failed = driver.sync(4, [first, second, third])
    assert time.monotonic() - before < TIMEOUT
    assert failed[4] == Failure("MemoryError", "injected: _make"), failed
    assert all("a rank died" in each.text for each in failed[:4]), failed

    # then it can, and gets what it lacks
    lie(driver, rollouts, "ababb")
    joined = driver.sync(4, [first, second, third])
    came_once(driver, rollouts, "ababb")
    assert joined[4]["replayed_tensors"] == joined[4]["tensors"], "marks have proven its plan"
    exact(driver, [first, second, third], tmp_path / "v4")

    # one leaves
    lie(driver, [second, third], "abba")
    together(driver.trainers, "train", 5)
    driver.sync(5, [second, third])
    came_once(driver, [second, third], "abba")
    exact(driver, [second, third], tmp_path / "v5")

    # it comes back, and leaves once more: all three have been a group before, and so have the two
    for version, engines in ((6, rollouts), (7, [second, third])):
        together(driver.trainers, "train", version)
        before = time.monotonic()
        none_failed(driver.sync(version, engines))
        assert time.monotonic() - before < TIMEOUT
        exact(driver, engines, tmp_path / f"v{version}")


def fail_and_die(driver: Driver, rollouts: list[Member], tmp_path: Path) -> None:
    second, third = rollouts
    # a trainer rank fails: the same error for all, and the engines generate nothing
    assert driver.trainers[1].ask("break_next", PACK).answer() is None
    failed_alike(driver.sync(8, [second, third]), "rank 1: MemoryError: injected: pack")
    assert len(second.ask("abandoned").answer()) > 0
    together(driver.trainers, "train", 9)
    driver.sync(9, [second, third])
    exact(driver, [second, third], tmp_path / "v9")

    # one dies while weights are on their way: the others hear of it in time, and go on without it
    assert third.ask("die_in_second_bucket").answer() is None
    before = time.monotonic()
    died = driver.sync(10, [second, third])
    assert time.monotonic() - before < 3 * TIMEOUT + 60
    assert died[3] is None and all("a rank died" in each.text for each in died[:3]), died
    together(driver.trainers, "train", 11)
    driver.sync(11, [second])
    exact(driver, [second], tmp_path / "v11")


def a_flip_is_found(driver: Driver, rollouts: list[Member], version: int, folder: Path, where: str) -> None:
    """One bit flips in what has come to a rollout rank, or in the engine's parameter after the copies: all ranks raise
    the same, and the next sync is exact."""
    if where == "way":
        how, text = ("flip_arriving",), "changed on the way to the engine"
    else:
        how, text = ("spoil", "model.layers.1.mlp.down_proj.weight"), "do not hold what was sent of model.layers.1.mlp."
    assert rollouts[0].ask(*how).answer() is None
    together(driver.trainers, "train", version)
    failed_alike(driver.sync(version, rollouts), text)
    together(driver.trainers, "train", version + 1)
    none_failed(driver.sync(version + 1, rollouts))
    exact(driver, rollouts, folder / f"v{version + 1}")


@pytest.mark.parametrize("trainer", ["Trainer", pytest.param("FSDP1Trainer", marks=pytest.mark.extended)])
def test_on_one_host_engines_read_the_memory_of_the_trainer(trainer: str, model: str, tmp_path: Path) -> None:
    """Staged at first, then where the parameters lie, for these are in memory that others can map; both again after a
    failure and for an engine that joins."""
    with members(model, 2, f"processes.{trainer}") as (driver, (first, second)):
        together(driver.trainers, "share", tmp_path)
        for version, engines in ((1, [first]), (2, [first]), (3, [first]), (4, [first, second]), (5, [first, second])):
            together(driver.trainers, "train", version)
            reports = driver.sync(version, engines)[2:]
            direct = version in (2, 3, 5)
            for report in reports:
                assert (report["direct_bytes"] > 0) == direct, (version, report)
                assert report["gathered_bytes"] == report["own_bytes"] == 0 < report["peer_bytes"], report
            exact(driver, engines, tmp_path / f"v{version}")
        assert driver.trainers[0].ask("break_next", READ).answer() is None
        failed_alike(driver.sync(6, [first, second]), "rank 0: MemoryError: injected: hash_parameters")
        together(driver.trainers, "train", 7)
        driver.sync(7, [first, second])
        exact(driver, [first, second], tmp_path / "v7")
        a_flip_is_found(driver, [first, second], 8, tmp_path, "engine")


def test_memory_that_cannot_be_mapped_is_broadcast_and_a_flip_is_found(model: str, tmp_path: Path) -> None:
    """In the sync that finds that out, before anything is loaded, and again in every group."""
    with members(model, 1) as (driver, (rollout,)):
        together(driver.trainers, "hide_staging")
        for version in (1, 2):
            together(driver.trainers, "train", version)
            (report,) = driver.sync(version, [rollout])[2:]
            assert report["delivery"] == "broadcast" and report["verified_tensors"] == report["tensors"], report
            exact(driver, [rollout], tmp_path / f"v{version}")
        assert not rollout.ask("abandoned").answer(), "a sync that goes on otherwise has not failed"
        a_flip_is_found(driver, [rollout], 3, tmp_path, "way")
        assert rollout.ask("report").answer()["delivery"] == "broadcast"
        a_flip_is_found(driver, [rollout], 5, tmp_path, "engine")


def test_each_tensor_parallel_rank_reads_only_its_part(model: str, tmp_path: Path) -> None:
    """Staged at first, then where the parameters lie: both ranks together read everything once, and what both keep
    twice."""
    with members(model, 1, tp=2) as (driver, ranks):
        first = ranks[0]
        together(driver.trainers, "share", tmp_path)
        kept = first.ask("nbytes", tmp_path / "kept").answer()
        for version, delivery in ((1, "staged"), (2, "direct"), (3, "direct")):
            together(driver.trainers, "train", version)
            reports = none_failed(driver.sync(version, ranks))[2:]
            assert [report["own_bytes"] + report["peer_bytes"] for report in reports] == kept, reports
            assert all(report["delivery"] == delivery and report["peer_bytes"] > 0 for report in reports), reports
            assert all(report["gathered_bytes"] == report["network_bytes"] == 0 for report in reports), reports
            exact(driver, [first], tmp_path / f"v{version}")
        # the engine generates until it is asked, so not while the trainer plans
        assert first.ask("asked_behind_plan").answer() == [True] * 3
