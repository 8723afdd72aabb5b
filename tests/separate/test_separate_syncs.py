# SPDX-License-Identifier: Apache-2.0
"""Two trainer ranks and real SGLang engines that share nothing with them: exact, also when engines come and go."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from megatron_cpu.engines import megatron_environment
from separate.driver import Driver, Failure, Member, together
from separate.processes import TIMEOUT, Rollout, Trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def model(tiny_model: Callable[[str], str]) -> str:
    return tiny_model("qwen2")


@contextmanager
def members(
    model: str, rollouts: int, strategy: str = "fsdp2", layout: dict[str, object] | None = None, **sync: object
) -> Iterator[tuple[Driver, list[Member]]]:
    """Two trainer ranks, and rollouts of one engine rank each."""
    port = free_port()
    with megatron_environment(megatron_bridge=True) if strategy == "megatron" else nullcontext():
        trainers = [Member(Trainer, rank, 2, port, model, sync, strategy, layout or {}) for rank in range(2)]
    engines = [Member(Rollout, free_port(), model, sync) for _ in range(rollouts)]
    try:
        assert [member.answer() for member in (*trainers, *engines)] == ["ready"] * (2 + rollouts)
        yield Driver(trainers), engines
    finally:
        for member in (*engines, *trainers):
            member.end()


def exact(driver: Driver, rollouts: list[Member], folder: Path) -> None:
    """Every engine holds what SGLang loads from a checkpoint of the trainer."""
    folder.mkdir()
    together(driver.trainers, "save", folder / "checkpoint")
    for number, rollout in enumerate(rollouts):
        own = folder / str(number)
        own.mkdir()
        assert rollout.ask("differs", folder / "checkpoint", own).answer() == []


def test_syncs_are_exact_while_engines_join_leave_fail_and_die(model: str, tmp_path: Path) -> None:
    with members(model, 3, delivery="broadcast") as (driver, rollouts):
        equal_and_other_weights(driver, rollouts[:2], tmp_path)
        come_and_go(driver, rollouts, tmp_path)
        fail_and_die(driver, rollouts[1:], tmp_path)


def equal_and_other_weights(driver: Driver, rollouts: list[Member], tmp_path: Path) -> None:
    first, second = rollouts
    together(driver.trainers, "train", 1)
    sent = driver.sync(1, [first, second])
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
    joined = driver.sync(4, [first, second, third])
    assert joined[4]["replayed_tensors"] == joined[4]["tensors"], "marks have proven its plan"
    exact(driver, [first, second, third], tmp_path / "v4")

    # one leaves
    together(driver.trainers, "train", 5)
    driver.sync(5, [second, third])
    exact(driver, [second, third], tmp_path / "v5")


def fail_and_die(driver: Driver, rollouts: list[Member], tmp_path: Path) -> None:
    second, third = rollouts
    # a trainer rank fails: the same error for all, and the engines generate nothing
    assert driver.trainers[1].ask("break_packing", 1).answer() is None
    failed = driver.sync(6, [second, third])
    texts = {each.text for each in failed if isinstance(each, Failure)}
    assert len(texts) == 1 and len(failed) == 4, failed
    assert "rank 1: MemoryError: injected: cannot pack" in texts.pop()
    assert len(second.ask("abandoned").answer()) > 0
    together(driver.trainers, "train", 7)
    driver.sync(7, [second, third])
    exact(driver, [second, third], tmp_path / "v7")

    # one dies while weights are on their way: the others hear of it in time, and go on without it
    assert third.ask("die_in_second_bucket").answer() is None
    before = time.monotonic()
    died = driver.sync(8, [second, third])
    assert time.monotonic() - before < 3 * TIMEOUT + 60
    assert died[3] is None and all(isinstance(each, Failure) for each in died[:3]), died
    assert all("a rank died" in each.text for each in died[:3]), died
    together(driver.trainers, "train", 9)
    driver.sync(9, [second])
    exact(driver, [second], tmp_path / "v9")


def test_on_one_host_engines_read_the_memory_of_the_trainer(model: str, tmp_path: Path) -> None:
    """Staged at first, then where the parameters lie, for these are in memory that others can map; both again after a
    failure and for an engine that joins."""
    with members(model, 2) as (driver, (first, second)):
        together(driver.trainers, "share", tmp_path)
        for version, engines in ((1, [first]), (2, [first]), (3, [first]), (4, [first, second]), (5, [first, second])):
            together(driver.trainers, "train", version)
            reports = driver.sync(version, engines)[2:]
            direct = version in (2, 3, 5)
            for report in reports:
                assert (report["direct_bytes"] > 0) == direct, (version, report)
                assert report["gathered_bytes"] == 0 < report["own_bytes"] + report["peer_bytes"], report
            exact(driver, engines, tmp_path / f"v{version}")
        assert driver.trainers[0].ask("break_reading").answer() is None
        failed = driver.sync(6, [first, second])
        texts = {each.text for each in failed if isinstance(each, Failure)}
        assert len(texts) == 1 and "rank 0: MemoryError: injected: cannot read" in texts.pop(), failed
        together(driver.trainers, "train", 7)
        driver.sync(7, [first, second])
        exact(driver, [first, second], tmp_path / "v7")


def test_a_megatron_trainer_with_experts_on_each_rank(tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    """Megatron-Bridge, expert-parallel: equal weights have equal hashes, and a failure leaves the next sync exact."""
    with members(tiny_model("qwen3-moe"), 1, "megatron", {"ep": 2}) as (driver, engines):
        hashes = []
        for version, seed in ((1, 1), (2, None), (3, 3)):
            if seed is not None:
                together(driver.trainers, "train", seed)
            *sent, report = driver.sync(version, engines)
            hashes.append(sent)
            assert report["replayed_tensors"] == report["tensors"] > 0 == report["coverage_missing"], report
            assert report["verified_tensors"] == report["tensors"] and report["gathered_bytes"] == 0, report
            exact(driver, engines, tmp_path / f"v{version}")
        assert hashes[0] == hashes[1] != hashes[2] and any(hashes[0][0])
        assert driver.trainers[1].ask("break_packing", 1).answer() is None
        failed = driver.sync(4, engines)
        texts = {each.text for each in failed if isinstance(each, Failure)}
        assert len(texts) == 1 and "rank 1: MemoryError: injected: cannot pack" in texts.pop(), failed
        together(driver.trainers, "train", 5)
        driver.sync(5, engines)
        exact(driver, engines, tmp_path / "v5")


def test_an_adapter_that_the_engines_serve_travels_alone_behind_the_base(model: str, tmp_path: Path) -> None:
    """Two engines, of which one joins late and gets the base as well; one that refuses fails the sync for all."""
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora": {"merge": False}}
    with members(model, 2, layout={"model": lora}) as (driver, (first, second)):
        for version, engines, base in ((1, [first], True), (2, [first], False), (3, [first, second], True)):
            expected, _ = together(driver.trainers, "train_adapter", version)
            reports = driver.sync(version, engines)[2:]
            for engine, report in zip(engines, reports, strict=True):
                assert (report["buckets"] > 0) == base and report["tensors"] >= len(expected) == 28, report
                assert_serves(engine, expected, str(version))
        assert second.ask("refuse_adapters", True).answer() is None
        failed = driver.sync(4, [first, second])
        texts = {each.text for each in failed if isinstance(each, Failure)}
        assert len(texts) == 1 and len(failed) == 4, failed
        assert "rank 3: RuntimeError: injected: no room for the adapter" in texts.pop()
        assert all(together([first, second], "abandoned"))
        assert second.ask("refuse_adapters", False).answer() is None
        expected, _ = together(driver.trainers, "train_adapter", 5)
        driver.sync(5, [first, second])
        for engine in (first, second):
            assert_serves(engine, expected, "5")


def assert_serves(engine: Member, expected: dict[str, torch.Tensor], version: str) -> None:
    """The engine was last given this adapter, bit for bit."""
    settings, factors, given = engine.ask("adapters").answer()[-1]
    assert given == version and settings["r"] == 4 and settings["lora_alpha"] == 8
    assert factors.keys() == expected.keys()
    assert all(torch.equal(factors[name], expected[name]) for name in expected)


@pytest.mark.extended  # of the same without an engine: tests/contract/test_exchanged.py
def test_over_hosts_every_byte_crosses_once_and_engines_of_a_host_share(model: str, tmp_path: Path) -> None:
    """Two engines on one other host, of which each holds a part for both; then one of them is on the trainer's."""
    with members(model, 2) as (driver, (first, second)):
        for member, host in ((first, "b"), (second, "b"), *((trainer, "a") for trainer in driver.trainers)):
            assert member.ask("place", host).answer() is None
        for version in (1, 2, 3):
            together(driver.trainers, "train", version)
            reports = driver.sync(version, [first, second])[2:]
            crossed = [report["network_bytes"] for report in reports]
            packed = driver.trainers[0].ask("packed").answer()
            assert sum(crossed) == packed and min(crossed) > 0.4 * packed, (crossed, packed)
            assert all(report["own_bytes"] > 0 < report["peer_bytes"] for report in reports), reports
            exact(driver, [first, second], tmp_path / f"v{version}")
        assert driver.trainers[1].ask("break_packing", 1).answer() is None
        failed = driver.sync(4, [first, second])
        texts = {each.text for each in failed if isinstance(each, Failure)}
        assert len(texts) == 1 and "rank 1: MemoryError: injected: cannot pack" in texts.pop(), failed
        driver.sync(5, [first])
        assert second.ask("place", "a").answer() is None
        together(driver.trainers, "train", 6)
        reports = driver.sync(6, [first, second])[2:]
        crossed = [report["network_bytes"] for report in reports]
        assert crossed == [driver.trainers[0].ask("packed").answer(), 0], "one reads what the trainer ranks packed"
        exact(driver, [first, second], tmp_path / "v6")
