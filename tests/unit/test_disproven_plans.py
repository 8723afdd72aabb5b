# SPDX-License-Identifier: Apache-2.0
"""Loads of which the recording says something else than what they do: what marks make of them, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from receiving import BF16, CPU, LENGTH, Engine, Pair, Receiver, Weights

from verl_sync_plugin.receiver.copy_plan import make_plan
from verl_sync_plugin.receiver.layout_key import LayoutKey
from verl_sync_plugin.receiver.recorder import record
from verl_sync_plugin.receiver.recording import Source
from verl_sync_plugin.receiver.uses import uses_in


class Swapping(Pair):
    """Its load takes tensors without bytes, as a recording gives them, for each other's."""

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            other = {"a": "b", "b": "a"}[name]
            getattr(self, other if tensor.is_meta else name).data.copy_(tensor)


def test_what_marks_disprove_stays_with_the_model_although_weights_are_alike() -> None:
    receiver = Receiver(Swapping())
    receiver.sync(1.0, 1.0)  # as norms are at first: a replay into the wrong places would write the same
    assert not receiver.unpacker.plan.planned
    assert "elsewhere than was recorded" in receiver.unpacker.plan.refused["a"]
    receiver.sync(2.0, 3.0)
    receiver.sync(4.0, 5.0)


@pytest.mark.parametrize("verified", [True, False])
def test_what_earlier_syncs_have_replayed_to_the_wrong_places_ends_the_sync(verified: bool) -> None:
    """And the syncs behind it are exact, whether or not they are verified."""
    receiver = Receiver(Swapping())
    receiver.sync(1.0, 1.0, verified=False)  # the comparison with the model's own load finds no difference
    assert receiver.unpacker.plan.planned
    with pytest.raises(ValueError, match=r"a, b elsewhere than earlier syncs did\. Set .*enabled=False"):
        receiver.sync(2.0, 3.0)
    receiver.sync(4.0, 5.0, verified=verified)
    receiver.sync(6.0, 7.0, verified=verified)


class Deriving(torch.nn.Module):
    """Computes something from a parameter behind its load, by an operation that counts as a view in inference mode."""

    def __init__(self, derive: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(8, 16, dtype=BF16), requires_grad=False)
        self._derive = derive

    def load_weights(self, weights: Weights) -> None:
        for _, tensor in weights:
            self.a.data.copy_(tensor)
        self.derived = self._derive(self.a.data)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("derive", [lambda a: a.to(torch.float32), lambda a: a.t().reshape(-1)])
def test_what_a_model_derives_is_seen_in_either_mode(
    mode: Callable[[], AbstractContextManager[None]], derive: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with mode():
        recording = record(Engine(Deriving(derive), 0), [Source("a", BF16, (8, 16), None)])
    assert recording.derives and len(recording.copies) == 1


class Joining(torch.nn.Module):
    """Joins two tensors, and puts the result elsewhere in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.p = torch.nn.Parameter(torch.zeros(4, 64, dtype=BF16), requires_grad=False)

    def load_weights(self, weights: Weights) -> None:
        parts = dict(weights)
        self.p.data.copy_(torch.cat([parts["a"], parts["b"]]).view(4, 64))


def test_a_joined_tensor_in_another_shape_is_left_to_the_model() -> None:
    sources = [Source(name, BF16, (1, 128), None) for name in ("a", "b")]
    plan = make_plan(Engine(Joining(), 0), sources, CPU)
    assert not plan.planned and set(plan.refused) == {"a", "b"}


class Layered(Pair):
    """Two tensors are written to one parameter; the one that comes first is changed on its way."""

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.a.data.copy_(tensor + 1 if name == "a" else tensor)


def test_a_copy_onto_what_the_models_own_path_writes_is_not_replayed() -> None:
    plan = make_plan(Engine(Layered(), 0), [Source(name, BF16, (LENGTH,), None) for name in ("a", "b")], CPU)
    assert not plan.planned and plan.refused["b"] == "is written where the model's own path writes, too"


class Dropping(Pair):
    """Computes with every tensor before it looks whether it has a place for it."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            changed = tensor + 1
            if name == "a" or self.keeps:
                getattr(self, name).data.copy_(changed)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_tensor_that_is_computed_with_and_dropped_is_not_used(keeps: bool) -> None:
    sources = [Source(name, BF16, (LENGTH,), None) for name in ("a", "b")]
    uses = uses_in(record(Engine(Dropping(keeps), 0), sources), sources)
    assert uses is not None and uses["a"] and bool(uses["b"]) is keeps


def test_a_module_that_was_replaced_is_a_new_layout() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    key = LayoutKey(Engine(model, 0))
    before = key.now()
    assert key.now() == before
    model[1] = torch.nn.Linear(4, 4)
    now = key.now()
    assert now != before and model[1].weight.data_ptr() in {entry[0] for entry in now[1:]}
    assert key.now() == now
