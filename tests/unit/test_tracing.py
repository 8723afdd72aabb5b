# SPDX-License-Identifier: Apache-2.0
"""Tracing: what it reads off a function equals what the function does to real tensors, or it refuses."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.trainers.megatron.trace import CopyTrace, NotACopyError

Tensors = list[torch.Tensor]
Function = Callable[[Tensors], Tensors]


def traced(function: Function, shape: tuple[int, ...], count: int) -> list[list[tuple[int, Run]]]:
    with CopyTrace(shape, torch.bfloat16, count) as trace:
        return [trace.runs(result) for result in function(trace.inputs)]


def check(function: Function, shape: tuple[int, ...], count: int) -> None:
    """Replays the runs on numbered elements."""
    numel = int(torch.Size(shape).numel())
    inputs = [torch.arange(index * numel, (index + 1) * numel).view(shape) for index in range(count)]
    for runs, result in zip(traced(function, shape, count), function(inputs), strict=True):
        copied = torch.full((result.numel(),), -1)
        for number, run in runs:
            source = inputs[number].reshape(-1)
            for plain in run.repeats():
                target = slice(plain.target, plain.target + plain.width)
                assert (copied[target] == -1).all(), "an element comes twice"
                copied[target] = source[plain.source : plain.source + plain.width]
        assert torch.equal(copied, result.reshape(-1))
        assert [run.target for _, run in runs] == sorted(run.target for _, run in runs)


def split_qkv(parts: Tensors) -> Tensors:
    groups = torch.cat(parts).view(4, -1, 6)
    return [part.reshape(-1, 6) for part in (groups[:, :4], groups[:, 4:6], groups[:, 6:])]


def split_gated(parts: Tensors) -> Tensors:
    gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
    return list(torch.cat((torch.cat(gates), torch.cat(ups))).chunk(2))


@pytest.mark.parametrize(
    ("function", "shape", "count"),
    [
        (lambda parts: [parts[0]], (5, 3), 1),
        (split_qkv, (16, 6), 2),
        (split_qkv, (8, 6), 4),
        (split_gated, (8, 5), 3),
        (lambda parts: [torch.cat(parts, dim=1)], (7, 4), 3),
        (lambda parts: [torch.cat(parts)[:9]], (6,), 2),
        (lambda parts: [torch.cat(parts, dim=1).t().contiguous()[2:5]], (4, 4), 2),
        (lambda parts: [part.unsqueeze(0).clone().squeeze(0)[1:] for part in parts], (4, 2), 2),
        (lambda parts: [torch.cat(parts)] * 2, (3,), 2),
        (lambda parts: [torch.cat(parts).permute(1, 0, 2).reshape(-1)], (2, 3, 4), 2),
        (lambda parts: [torch.cat((parts[1], parts[0], parts[1][:1]))], (2, 3), 2),
        (lambda parts: [parts[0][:0]], (4,), 1),
    ],
)
def test_replayed_it_is_the_function(function: Function, shape: tuple[int, ...], count: int) -> None:
    check(function, shape, count)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 6),
    count=st.integers(1, 4),
    steps=st.lists(st.sampled_from(["cat0", "cat1", "turn", "flat", "tail", "copy"]), max_size=5),
)
def test_any_sequence_of_copies(rows: int, columns: int, count: int, steps: list[str]) -> None:
    def function(parts: Tensors) -> Tensors:
        whole = torch.cat(parts)
        for step in steps:
            if step in ("cat0", "cat1"):
                whole = torch.cat((whole[1:], whole[:1]), dim=0 if step == "cat0" else -1) if len(whole) == 2 else whole
            elif step == "turn" and whole.dim() == 2:
                whole = whole.t()
            elif step == "flat":
                whole = whole.reshape(-1)
            elif step == "tail":
                whole = whole[len(whole) // 2 :]
            else:
                whole = whole.clone()
        return [whole]

    check(function, (rows, columns), count)


@pytest.mark.parametrize(
    "function",
    [
        lambda parts: [parts[0] + parts[1]],
        lambda parts: [parts[0].float()],
        lambda parts: [torch.cat((parts[0], parts[1] * 2))],
        lambda parts: [torch.cat((parts[0], torch.zeros_like(parts[1])))],
        lambda parts: [parts[0].clone().mul_(2)],
        lambda parts: [torch.nn.functional.pad(parts[0], (0, 1))],
    ],
)
def test_computation_is_refused(function: Function) -> None:
    with pytest.raises(NotACopyError):
        traced(function, (4, 4), 2)


def test_large_weights_take_no_memory_and_little_time() -> None:
    started = time.monotonic()
    ((whole,),) = [traced(lambda parts: [parts[0]], (152064, 8192), 1)[0]]
    assert whole == (0, Run(0, 0, 152064 * 8192))
    (rows,) = traced(lambda parts: [torch.cat(parts, dim=1)], (8192, 3696), 8)
    assert rows[1] == (1, Run(0, 3696, 3696, 8192, 3696, 8 * 3696))
    assert len(rows) == 8 and time.monotonic() - started < 10
