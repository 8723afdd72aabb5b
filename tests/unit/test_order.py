# SPDX-License-Identifier: Apache-2.0
"""Which writes of a load a replay would bring in another order: it writes constants first, then copies."""

from __future__ import annotations

import time

import torch

from verl_sync_plugin.receiver.order import fills_contradict, grounds, overwritten, superseded
from verl_sync_plugin.receiver.recording import Copy, Fill

MEMORY = torch.zeros(4, 8)
ELSEWHERE = torch.zeros(4, 8)


def test_constants_over_one_another() -> None:
    rows, columns = Fill(MEMORY[1:3], 0.0), Fill(MEMORY[:, 2:4], 1.0, 1)
    assert fills_contradict([rows, columns])
    assert not fills_contradict([rows, Fill(MEMORY[:, 2:4], 0.0, 1)]), "the same constant"
    assert not fills_contradict([rows, Fill(MEMORY[3:], 1.0, 1), Fill(ELSEWHERE, 1.0, 2)]), "other bytes"
    assert not fills_contradict([Fill(MEMORY[:, :2], 0.0), Fill(MEMORY[:, 2:4], 1.0, 1)]), "columns side by side"
    assert fills_contradict([Fill(MEMORY[0], 1.0), Fill(MEMORY[1], 0.0, 1), Fill(MEMORY.flatten()[7:9], 1.0, 2)])


def test_constants_over_copies() -> None:
    copies = [Copy("a", MEMORY, MEMORY[:2], 0), Copy("b", MEMORY, MEMORY[2:], 2), Copy("c", ELSEWHERE, ELSEWHERE, 1)]
    assert overwritten(copies, []) == []
    assert overwritten(copies, [Fill(MEMORY[:, 0], 0.0, 3)]) == ["a", "b"]
    assert overwritten(copies, [Fill(MEMORY[:, 0], 0.0, 1)]) == ["a"], "what is copied later stays"
    assert overwritten(copies, [Fill(MEMORY[:2], 0.0, 3)]) == ["a"]


def test_copies_over_constants() -> None:
    copy = Copy("a", MEMORY, MEMORY[:2], 1)
    fills = [Fill(MEMORY, 0.0, 0), Fill(MEMORY[2:], 0.0, 2), Fill(MEMORY[0], 0.0, 3)]
    assert grounds([copy], fills) == {0}, "not what is beside, nor what is written later"


def test_copies_over_copies_of_another_tensor() -> None:
    first, second = Copy("a", MEMORY, MEMORY[:2], 0), Copy("b", MEMORY, MEMORY[1:3], 1)
    assert superseded([first, second]) == superseded([second, first]) == {0}
    assert superseded([first, Copy("a", MEMORY, MEMORY[1:3], 1)]) == set(), "its own"
    assert superseded([first, Copy("b", MEMORY, MEMORY[2:], 1), Copy("c", ELSEWHERE, ELSEWHERE, 2)]) == set()
    assert superseded([Copy("a", MEMORY, MEMORY[:, ::2], 0), Copy("b", MEMORY, MEMORY[:, 1::2], 1)]) == set()


def test_thousands_of_experts_take_no_time() -> None:
    """As many halves of one parameter as 512 experts have, and padding behind each."""
    rows = torch.zeros(1024, 40)
    copies = [Copy(f"{number}", rows, rows[number, :32], number) for number in range(1024)]
    fills = [Fill(rows[number, 32:], 0.0, 2000 + number) for number in range(1024)]
    started = time.perf_counter()
    assert (
        not overwritten(copies, fills)
        and not superseded(copies)
        and not fills_contradict([*fills, Fill(ELSEWHERE, 1.0)])
    )
    assert time.perf_counter() - started < 2
