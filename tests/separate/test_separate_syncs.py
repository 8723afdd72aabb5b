# SPDX-License-Identifier: Apache-2.0
"""Two trainer ranks and real SGLang engines that share nothing with them: exact, also when engines come and go."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from megatron_cpu.engines import megatron_environment
from separate.driver import Driver, Failure, Member, together
from separate.members import exact, members
from separate.processes import TIMEOUT, FSDP1Trainer, MegatronTrainer, Trainer
from separate.spoiling import a_flip_in_the_engine_is_found, a_flip_on_the_way_is_found

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


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
    """Behind the first sync of a group: every trainer rank's segments have come to every other rank, each once. What
    counts as having crossed the network is, for every rank, all that trainer ranks on other hosts have sent."""
    sends = driver.trainers[0].ask("sends").answer()
    assert min(sends) > 0 and sum(sends) == driver.trainers[0].ask("packed").answer(), "there is nothing to fill up"
    for rank, member in enumerate((*driver.trainers, *rollouts)):
        others = {sender: nbytes for sender, nbytes in enumerate(sends) if sender != rank}
        crossing = sum(nbytes for sender, nbytes in others.items() if hosts[sender] != hosts[rank])
        assert member.ask("came").answer() == (others, crossing), (rank, hosts)


def equal_and_other_weights(driver: Driver, rollouts: list[Member], tmp_path: Path) -> None:
    first, second = rollouts
    lie(driver, [first, second], "abab")
    together(driver.trainers, "train", 1)
    sent = driver.sync(1, [first, second])
    came_once(driver, [first, second], "abab")
    words = together([first, second], "generate")
    assert words[0] == words[1]
    exact(driver, [first, second], tmp_path / "v1")

    # equal weights: the same hashes, the same words
    again = driver.sync(2, [first, second])
    assert again[:2] == sent[:2] and any(again[0]), "hashes of equal weights"
    assert together([first, second], "generate") == words
    report = again[2]
    assert report["manager"] == "SeparateRollout" and report["global_steps"] == 2
    assert report["replayed_tensors"] == report["tensors"] and report["buckets"] > 3
    assert report["own_bytes"] > 0 == report["peer_bytes"], "each engine rank reads what was sent to its rollout rank"

    # after a step of training: other hashes, other words
    together(driver.trainers, "train", 3)
    changed = driver.sync(3, [first, second])
    assert changed[0] != sent[0]
    assert together([first, second], "generate") != words
    exact(driver, [first, second], tmp_path / "v3")


def come_and_go(driver: Driver, rollouts: list[Member], tmp_path: Path) -> None:
    first, second, third = rollouts
    # one more cannot join, which all hear of at once
    assert third.ask("break_making").answer() is None
    before = time.monotonic()
    failed = driver.sync(4, [first, second, third])
    assert time.monotonic() - before < TIMEOUT
    assert failed[4] == Failure("ValueError", "injected: cannot be synced"), failed
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
        assert not any(isinstance(each, Failure) for each in driver.sync(version, engines))
        assert time.monotonic() - before < TIMEOUT
        exact(driver, engines, tmp_path / f"v{version}")


def fail_and_die(driver: Driver, rollouts: list[Member], tmp_path: Path) -> None:
    second, third = rollouts
    # a trainer rank fails: the same error for all, and the engines generate nothing
    assert driver.trainers[1].ask("break_packing", 1).answer() is None
    failed = driver.sync(8, [second, third])
    texts = {each.text for each in failed if isinstance(each, Failure)}
    assert len(texts) == 1 and len(failed) == 4, failed
    assert "rank 1: MemoryError: injected: cannot pack" in texts.pop()
    assert len(second.ask("abandoned").answer()) > 0
    together(driver.trainers, "train", 9)
    driver.sync(9, [second, third])
    exact(driver, [second, third], tmp_path / "v9")

    die(driver, second, third, 10, tmp_path)


def die(driver: Driver, left: Member, dying: Member, version: int, tmp_path: Path) -> None:
    """One dies while weights are on their way: the others hear of it in time, and go on without it."""
    assert dying.ask("die_in_second_bucket").answer() is None
    before = time.monotonic()
    died = driver.sync(version, [left, dying])
    assert time.monotonic() - before < 3 * TIMEOUT + 60
    assert died[3] is None and all(isinstance(each, Failure) for each in died[:3]), died
    assert all("a rank died" in each.text for each in died[:3]), died
    together(driver.trainers, "train", version + 1)
    driver.sync(version + 1, [left])
    exact(driver, [left], tmp_path / f"v{version + 1}")


@pytest.mark.parametrize("trainer", [Trainer, pytest.param(FSDP1Trainer, marks=pytest.mark.extended)])
def test_on_one_host_engines_read_the_memory_of_the_trainer(trainer: type[Trainer], model: str, tmp_path: Path) -> None:
    """Staged at first, then where the parameters lie, for these are in memory that others can map; both again after a
    failure and for an engine that joins."""
    with members(model, 2, trainer) as (driver, (first, second)):
        together(driver.trainers, "share", tmp_path)
        for version, engines in ((1, [first]), (2, [first]), (3, [first]), (4, [first, second]), (5, [first, second])):
            together(driver.trainers, "train", version)
            reports = driver.sync(version, engines)[2:]
            direct = version in (2, 3, 5)
            for report in reports:
                assert (report["direct_bytes"] > 0) == direct, (version, report)
                assert report["gathered_bytes"] == report["own_bytes"] == 0 < report["peer_bytes"], report
            exact(driver, engines, tmp_path / f"v{version}")
        assert driver.trainers[0].ask("break_reading").answer() is None
        failed = driver.sync(6, [first, second])
        texts = {each.text for each in failed if isinstance(each, Failure)}
        assert len(texts) == 1 and "rank 0: MemoryError: injected: cannot read" in texts.pop(), failed
        together(driver.trainers, "train", 7)
        driver.sync(7, [first, second])
        exact(driver, [first, second], tmp_path / "v7")
        a_flip_in_the_engine_is_found(driver, [first, second], 8, tmp_path)


def test_memory_that_cannot_be_mapped_is_broadcast_and_a_flip_is_found(model: str, tmp_path: Path) -> None:
    """In the sync that finds that out, before anything is loaded, and in every group anew."""
    with members(model, 1) as (driver, (rollout,)):
        together(driver.trainers, "hide_staging")
        for version in (1, 2):
            together(driver.trainers, "train", version)
            (report,) = driver.sync(version, [rollout])[2:]
            assert report["delivery"] == "broadcast" and report["verified_tensors"] == report["tensors"], report
            exact(driver, [rollout], tmp_path / f"v{version}")
        assert not rollout.ask("abandoned").answer(), "a sync that goes on otherwise has not failed"
        a_flip_on_the_way_is_found(driver, [rollout], 3, tmp_path)
        assert rollout.ask("report").answer()["delivery"] == "broadcast"
        a_flip_in_the_engine_is_found(driver, [rollout], 5, tmp_path)


@pytest.mark.extended  # up to 90 s each
@pytest.mark.parametrize("kind", ["fsdp1", "megatron"])
def test_other_trainers_are_synced_as_an_fsdp2_one_is(kind: str, model: str, tmp_path: Path) -> None:
    """Two ranks, Megatron's tensor-parallel; broadcast, so that every one of them sends what it holds."""
    megatron = kind != "fsdp1"
    environment = megatron_environment() if megatron else nullcontext()
    trainer = MegatronTrainer if megatron else FSDP1Trainer
    with members(model, 1, trainer, environment) as (driver, (rollout,)):
        lie(driver, [rollout], "aab")
        sent = driver.sync(1, [rollout])
        words = rollout.ask("generate").answer()
        exact(driver, [rollout], tmp_path / "v1")

        again = driver.sync(2, [rollout])
        assert again[:2] == sent[:2] and all(any(hashes) for hashes in sent[:2]), "hashes of equal weights"
        assert rollout.ask("generate").answer() == words
        assert again[2]["manager"] == "SeparateRollout" and again[2]["global_steps"] == 2
        assert again[2]["replayed_tensors"] == again[2]["tensors"] and again[2]["coverage_missing"] == 0

        together(driver.trainers, "step")
        changed = driver.sync(3, [rollout])
        assert all(now != before for now, before in zip(changed[:2], sent[:2], strict=True))
        assert rollout.ask("generate").answer() != words
        exact(driver, [rollout], tmp_path / "v3")

        assert driver.trainers[1].ask("break_packing", 1).answer() is None
        failed = driver.sync(4, [rollout])
        texts = {each.text for each in failed if isinstance(each, Failure)}
        assert len(texts) == 1 and "rank 1: MemoryError: injected: cannot pack" in texts.pop(), failed
        together(driver.trainers, "step")
        driver.sync(5, [rollout])
        exact(driver, [rollout], tmp_path / "v5")
