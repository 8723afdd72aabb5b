# SPDX-License-Identifier: Apache-2.0
"""Where a Megatron rank's weights are looked up: every way in which a model may change between two syncs is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import Module, Parameter

from verl_sync_plugin.trainers.megatron import model as megatron_model
from verl_sync_plugin.trainers.megatron.model import ModelTensors


class Layer(Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(2, 3))
        self.register_parameter("bias", None)
        self.empty = Parameter(torch.empty(0))
        self.register_buffer("expert_bias", torch.ones(3))
        self.register_buffer("frequencies", torch.ones(4))


class Model(Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Two plain models; Megatron's wrappers are left to the tests with Megatron."""
    monkeypatch.setattr(megatron_model, "unwrapped", lambda chunk: chunk)
    yield [Model(), Model()]


def check(found: ModelTensors, chunks: list[Any]) -> None:
    """What was looked up is what a walk finds, name by name."""
    named = [(name, id(tensor)) for _, _, held in found.named() for name, tensor, *_ in held]
    walked = [(h.name, id(h.tensor)) for chunk in chunks for h in megatron_model.held_by(chunk) if h.tensor.numel()]
    assert named == walked
    assert [id(tensor) for tensor in found.tensors] == [number for _, number in walked]


def _bias(model: Any) -> None:
    model.first.bias = Parameter(torch.ones(3))


def _no_weight(model: Any) -> None:
    model.first.weight = None


def _renamed(model: Any) -> None:
    model.first.other = Parameter(model.first.weight.detach())
    del model.first.weight


def _shape(model: Any) -> None:
    model.first.weight.data = torch.ones(3, 2)


def _dtype(model: Any) -> None:
    model.first.expert_bias = torch.ones(3, dtype=torch.float64)


def _filled(model: Any) -> None:
    model.second.empty.data = torch.ones(5)


def _emptied(model: Any) -> None:
    model.second.weight.data = torch.empty(0)


def _one_more(model: Any) -> None:
    model.third = Layer()


def _one_less(model: Any) -> None:
    del model.second


@pytest.mark.parametrize(
    "change", [_bias, _no_weight, _renamed, _shape, _dtype, _filled, _emptied, _one_more, _one_less]
)
def test_other_weights_are_told(chunks: list[Any], change: Callable[[Any], None]) -> None:
    found = ModelTensors(chunks)
    found.look()
    change(chunks[1])
    assert found.look() == (True, True)
    check(found, chunks)
    assert found.look() == (False, False)


@pytest.mark.parametrize("which", ["first", "second"])
def test_tied_weights_of_which_one_is_replaced(chunks: list[Any], which: str) -> None:
    chunks[0].second.weight = chunks[0].first.weight
    found = ModelTensors(chunks)
    found.look()
    getattr(chunks[0], which).weight = Parameter(torch.zeros(2, 3))
    assert found.look() == (True, True), "there is one weight more"
    check(found, chunks)
