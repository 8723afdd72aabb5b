# SPDX-License-Identifier: Apache-2.0
"""What a recording of a load says of dtypes, of memory that dies meanwhile, and of constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from receiving import Engine, Weights

from verl_sync_plugin.receiver.constants import kept_constants
from verl_sync_plugin.receiver.recorder import record
from verl_sync_plugin.receiver.recording import Source

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


class Model(torch.nn.Module):
    """Parameters that are loaded by one function each."""

    def __init__(self, loads: dict[str, Any], dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.loads = loads
        for name in loads:
            self.register_buffer(name, torch.zeros(4, dtype=FP32 if name == "wide" else dtype))
        for name in ("old", "last"):
            self.register_buffer(name, torch.zeros(4))

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.loads[name](getattr(self, name), tensor)


def sources(model: Model, dtype: torch.dtype = BF16) -> list[Source]:
    return [Source(name, dtype, (4,), None) for name in model.loads]


def plain(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.copy_(tensor)


def test_what_is_kept_wide_or_computed_from_is_told() -> None:
    def in_place(target: torch.Tensor, tensor: torch.Tensor) -> None:
        tensor += 1  # as SGLang's Gemma does
        target.copy_(tensor)

    loads = {
        "a": plain,
        "wide": plain,
        "one_more": lambda target, tensor: target.copy_(tensor + 1),
        "in_place": in_place,
        "moved": lambda target, tensor: target.copy_(tensor.clone()),
        "read": lambda target, tensor: target.fill_(tensor[0].item()),
    }
    model = Model(loads)
    found = record(Engine(model, 0), sources(model)).wider(sources(model))
    assert found == {"wide": FP32, "one_more": FP64, "in_place": FP64, "read": FP64}
    assert record(Engine(model, 0), sources(model, FP32)).wider(sources(model, FP32)).keys() == found.keys() - {"wide"}


def test_a_load_that_raises_says_nothing_of_what_it_did_not_do() -> None:
    def failing(target: torch.Tensor, tensor: torch.Tensor) -> None:
        raise RuntimeError("no meta tensors here")

    model = Model({"a": failing, "b": plain})
    assert record(Engine(model, 0), sources(model)).wider(sources(model)) == {}


def test_memory_that_dies_lends_its_identity_to_none() -> None:
    model = Model({"a": plain})
    scratch: list[torch.Tensor] = []

    def through_scratch(target: torch.Tensor, tensor: torch.Tensor) -> None:
        model.old = None  # its storage is free
        scratch.extend(torch.zeros(4) for _ in range(64))
        for each in scratch:
            each.copy_(tensor)

    model.loads["a"] = through_scratch
    recording = record(Engine(model, 0), sources(model))
    assert not recording.copies and recording.refused == {"a": "is copied elsewhere"}


@pytest.mark.parametrize("value", [0, 1])
def test_a_weight_that_equals_its_ground_is_no_constant(value: int) -> None:
    """Marks of one bit do so every other time."""

    def on_a_ground(target: torch.Tensor, tensor: torch.Tensor) -> None:
        target.zero_()
        target.copy_(tensor)

    model = Model({"flag": on_a_ground}, torch.bool)
    recording = record(Engine(model, 0), sources(model, torch.bool))
    with torch.no_grad():
        model.load_weights([("flag", torch.full((4,), value, dtype=torch.bool))])
    assert kept_constants(recording) == []
