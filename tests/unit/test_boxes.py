# SPDX-License-Identifier: Apache-2.0
"""Runs of a box in a tensor, against slicing."""

from __future__ import annotations

import random

import torch

from verl_sync_plugin.layout.strided import box_runs


def written(size: list[int], offset: list[int], whole: list[int]) -> torch.Tensor:
    """What the runs make of a box of numbers from 1 on."""
    box = torch.arange(1, 1 + int(torch.Size(size).numel()))
    target = torch.zeros(int(torch.Size(whole).numel()), dtype=torch.int64)
    for run in box_runs(size, offset, whole):
        for plain in run.repeats():
            part = target[plain.target : plain.target + plain.width]
            assert part.numel() == plain.width and not part.any(), "written twice, or outside"
            part.copy_(box[plain.source : plain.source + plain.width])
    return target.view(whole)


def test_boxes_of_one_to_four_dimensions_are_where_slicing_puts_them() -> None:
    chance = random.Random(1)
    for _ in range(600):
        whole = [chance.randint(1, 5) for _ in range(chance.randint(1, 4))]
        size = [length if chance.random() < 0.5 else chance.randint(1, length) for length in whole]
        offset = [chance.randint(0, length - held) for length, held in zip(whole, size, strict=True)]
        expected = torch.zeros(whole, dtype=torch.int64)
        place = tuple(slice(at, at + held) for at, held in zip(offset, size, strict=True))
        expected[place] = torch.arange(1, 1 + int(torch.Size(size).numel())).view(size)
        assert torch.equal(written(size, offset, whole), expected), (size, offset, whole)


def test_few_runs_where_rows_lie_at_one_stride() -> None:
    assert len(box_runs([], [], [])) == 1, "a number without dimensions"
    assert len(box_runs((4, 8), (0, 0), (4, 8))) == 1
    assert len(box_runs((64, 3, 8), (0, 5, 0), (64, 9, 8))) == 1, "a part of each of 64 experts"
    assert len(box_runs((64, 9, 4), (0, 0, 4), (64, 9, 8))) == 1, "columns of all experts"
    assert len(box_runs((2, 3, 4), (1, 2, 3), (8, 9, 8))) == 2
