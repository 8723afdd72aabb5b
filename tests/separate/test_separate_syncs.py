# SPDX-License-Identifier: Apache-2.0
"""Two trainer ranks and real SGLang engines that share nothing with them: exact, also when engines come and go."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from separate.driver import Driver, Failure, Member, exact, failed_alike, members, none_failed, together
from separate.processes import TIMEOUT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_syncs_are_exact_while_engines_come_go_fail_and_die(tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    with members(tiny_model("qwen2"), 3) as (driver, rollouts):
        hidden_staging_memory(driver, rollouts[:1], tmp_path)
        parameters_read_in_place(driver, rollouts[1:], tmp_path)
        broadcast_to_two_hosts(driver, rollouts[:2], tmp_path)
        come_and_go(driver, rollouts, tmp_path)
        fail_and_die(driver, rollouts[1:], tmp_path)


@pytest.mark.extended
def test_flat_parameters_are_read_in_place(tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    with members(tiny_model("qwen2"), 2, "processes.FSDP1Trainer") as (driver, rollouts):
        parameters_read_in_place(driver, rollouts, tmp_path)


def synced(driver: Driver, rollouts: list[Member], version: int, folder: Path) -> list[dict[str, Any]]:
    """A sync of other weights than before, after which every engine is exact; returns the reports of the rollouts."""
    together(driver.trainers, "train", version)
    reports = none_failed(driver.sync(version, rollouts))
    exact(driver, rollouts, folder / f"v{version}")
    return reports[len(driver.trainers) :]


def hidden_staging_memory(driver: Driver, rollouts: list[Member], folder: Path) -> None:
    """Slots that no engine rank can open: the sync that finds that out is a broadcast, and so is the next."""
    (rollout,) = rollouts
    together(driver.trainers, "hide_staging", True)
    for version in (1, 2):
        (report,) = synced(driver, rollouts, version, folder)
        assert report["delivery"] == "broadcast" and report["verified_tensors"] == report["tensors"], report
    assert not rollout.ask("sglang.abandoned.copy").answer(), "a sync that goes on otherwise has not failed"
    a_flip_is_found(driver, rollouts, 3, folder, ("spoil_second_bucket", False), "changed on the way to the engine")
    together(driver.trainers, "hide_staging", False)


def parameters_read_in_place(driver: Driver, rollouts: list[Member], folder: Path) -> None:
    """Stages a first sync, then reads parameters where they lie; both again for an engine that joins."""
    first, second = rollouts
    together(driver.trainers, "share", folder)
    for version, engines in ((11, [second]), (12, [second]), (13, [first, second]), (14, [first, second])):
        for report in synced(driver, engines, version, folder):
            assert report["delivery"] == ("in place" if version in (12, 14) else "staged"), (version, report)
    assert driver.trainers[0].ask("break_next", "engine._manager.sender.hash_parameters").answer() is None
    together([*driver.trainers, *rollouts], "note_rounds")
    failed_alike(driver.sync(15, rollouts), "rank 0: MemoryError: injected: hash_parameters")
    for rounds in together([*driver.trainers, *rollouts], "rounds"):
        assert rounds == ["planning the sync", "connecting to the engine"], "a steady sync plans in one round"
    synced(driver, rollouts, 16, folder)
    spoil = ("spoil", "model.layers.1.mlp.down_proj.weight")
    a_flip_is_found(driver, rollouts, 17, folder, spoil, "do not hold what was sent of model.layers.1.mlp.")


def a_flip_is_found(
    driver: Driver, rollouts: list[Member], version: int, folder: Path, flip: tuple[object, ...], text: str
) -> None:
    """One bit flips, which all ranks hear of; the next sync is exact."""
    assert rollouts[0].ask(*flip).answer() is None
    together(driver.trainers, "train", version)
    failed_alike(driver.sync(version, rollouts), text)
    synced(driver, rollouts, version + 1, folder)


def lie(driver: Driver, rollouts: list[Member], hosts: str) -> None:
    """From the next group on all ranks are on hosts of these names, a letter for each."""
    for member, host in zip((*driver.trainers, *rollouts), hosts, strict=True):
        assert member.ask("place", host).answer() is None


def broadcast(driver: Driver, rollouts: list[Member]) -> None:
    for member in (*driver.trainers, *rollouts):
        assert member.ask("report").answer()["delivery"] == "broadcast"


def broadcast_to_two_hosts(driver: Driver, rollouts: list[Member], folder: Path) -> None:
    lie(driver, rollouts, "abab")
    for version in (21, 22):
        report = synced(driver, rollouts, version, folder)[0]
    broadcast(driver, rollouts)
    assert report["manager"] == "SeparateRollout" and report["global_steps"] == 22
    assert report["replayed_tensors"] == report["tensors"] and report["buckets"] > 3


def come_and_go(driver: Driver, rollouts: list[Member], folder: Path) -> None:
    _, second, third = rollouts
    # one more cannot join, which all hear of at once
    assert third.ask("break_next", "adapter._separate._make").answer() is None
    before = time.monotonic()
    failed = driver.sync(24, rollouts)
    assert time.monotonic() - before < TIMEOUT
    assert failed[4] == Failure("MemoryError", "injected: _make"), failed
    assert all("a rank died" in each.text for each in failed[:4]), failed
    # then it can, and gets what it lacks
    lie(driver, rollouts, "ababb")
    joined = synced(driver, rollouts, 24, folder)[2]
    broadcast(driver, rollouts)
    assert joined["replayed_tensors"] == joined["tensors"], "marks have proven its plan"
    # one leaves
    lie(driver, [second, third], "abba")
    synced(driver, [second, third], 25, folder)
    broadcast(driver, [second, third])
    # it comes back, and leaves once more: all three have been a group before, and so have the two
    for version, engines in ((26, rollouts), (27, [second, third])):
        before = time.monotonic()
        synced(driver, engines, version, folder)
        assert time.monotonic() - before < 2 * TIMEOUT


def fail_and_die(driver: Driver, rollouts: list[Member], folder: Path) -> None:
    second, third = rollouts
    # a trainer rank fails: the same error for all, and the engines generate nothing
    assert driver.trainers[1].ask("break_next", "engine._manager.sender.pack").answer() is None
    before = len(second.ask("sglang.abandoned.copy").answer())
    failed_alike(driver.sync(28, rollouts), "rank 1: MemoryError: injected: pack")
    assert len(second.ask("sglang.abandoned.copy").answer()) > before
    synced(driver, rollouts, 29, folder)
    # one dies while weights are on their way: the others hear of it in time, and go on without it
    assert third.ask("spoil_second_bucket", True).answer() is None
    began = time.monotonic()
    died = driver.sync(30, rollouts)
    assert time.monotonic() - began < 3 * TIMEOUT + 60
    assert died[3] is None and all("a rank died" in each.text for each in died[:3]), died
    synced(driver, [second], 31, folder)
