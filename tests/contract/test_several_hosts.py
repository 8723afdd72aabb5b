# SPDX-License-Identifier: Apache-2.0
"""Ranks on one host and on several: staged, and by broadcast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.multiprocessing as mp

import unmeasured
from contract.several_hosts import Case, play
from ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _play(folder: Path, tp: int, *cases: Case) -> None:
    port = free_port()
    with unmeasured.children():
        mp.spawn(play, args=(str(folder), port, tp, cases), nprocs=len(cases[0].hosts))


def test_four_ranks_on_one_two_and_three_hosts(tmp_path: Path) -> None:
    """Replicas of two engine ranks: on one host each, or across hosts."""
    one, two, three = ("a",) * 4, ("a", "a", "b", "b"), ("a", "b", "c", "a")
    _play(tmp_path, 2, Case(one, bucket_bytes=20_000, failing=True), Case(two, joint=True, failing=True), Case(three))


def test_two_ranks_on_two_hosts(tmp_path: Path) -> None:
    """One engine across them."""
    _play(tmp_path, 2, Case(("a", "b"), failing=True), Case(("a", "b"), joint=True))
