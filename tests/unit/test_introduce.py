# SPDX-License-Identifier: Apache-2.0
"""What an engine rank finds out about odd loads of small models, and that syncs are exact all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from receiving import BF16, CPU, LENGTH, Engine, Pair, Receiver, Weights

from verl_sync_plugin.engine.introduce import introduce
from verl_sync_plugin.engine.recorder import Source
from verl_sync_plugin.layout.load_map import MOST_TRIES, LoadMap, unwritten, wire_dtypes
from verl_sync_plugin.rollouts.sglang.model import SGLangModel, why_skipped

FP32 = torch.float32


def found_of(model: torch.nn.Module, sources: Iterable[Source], kind: Any = Engine) -> LoadMap:
    return introduce(kind(model, 0), list(sources), {}, CPU)[0]


def pair(dtype: torch.dtype = BF16) -> list[Source]:
    return [Source(name, dtype, (LENGTH,), None) for name in ("a", "b")]


def left_of(found: LoadMap, names: str = "ab") -> dict[str, str]:
    return {names[left.tensor]: left.why for left in found.left}


class Layered(Pair):
    """Two tensors are written to one parameter; the one that comes first is changed on its way."""

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.a.data[: LENGTH // 2 if name == "b" else LENGTH].copy_(
                tensor + 1 if name == "a" else tensor[: LENGTH // 2]
            )


class Random(Pair):
    """Writes what comes from no tensor, and is another each time."""

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.a.data.copy_(tensor) if name == "a" else self.b.data.random_(0, 99)


def test_a_copy_onto_what_the_models_own_load_writes_is_left_to_it() -> None:
    found = found_of(Layered(), pair())
    assert left_of(found)["b"] == "is written where the model's own load writes, too"
    assert [kept.name for kept, *_ in unwritten(found)] == ["b"]


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
    takes = {left.tensor: left.takes for left in found_of(Dropping(keeps), pair()).left}
    assert takes == {0: ((0, LENGTH),), 1: ((0, LENGTH),) if keeps else ()}


def test_what_is_random_is_no_constant() -> None:
    found = found_of(Random(), pair())
    assert not found.constants and set(left_of(found)) == {"a", "b"}


class Constant(Pair):
    """Writes a row of numbers that come from no tensor, one number, and a copy over a part of it."""

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            getattr(self, name).data.fill_(3)
            getattr(self, name).data[8:].copy_(tensor[8:])
            self.a.data[:4].copy_(torch.arange(4))


def test_constants_are_what_lasts_of_them() -> None:
    found = found_of(Constant(), pair())
    assert not found.left and not unwritten(found)
    assert sorted((each.place, each.spans, len(each.bits)) for each in found.constants) == [
        (0, ((0, 8),), 8),
        (0, ((8, 16),), 2),
        (1, ((0, 16),), 2),
    ]


@pytest.mark.parametrize("value", [0, 1])
def test_a_weight_that_equals_its_ground_is_no_constant(value: int) -> None:
    """Marks of one bit do so every other time."""

    class Flag(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.zeros(4, dtype=torch.bool))

        def load_weights(self, weights: Weights) -> None:
            for _, tensor in weights:
                self.a.fill_(value)
                self.a.copy_(tensor)

    found = found_of(Flag(), [Source("a", torch.bool, (4,), None)])
    assert not found.constants and not found.left and len(found.moves) == 1


class Deriving(torch.nn.Module):
    """Computes something from a parameter after its load, by an operation that counts as a view in inference mode."""

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
        found = found_of(Deriving(derive), [Source("a", BF16, (8, 16), None)])
    assert left_of(found) == {"a": "its load computes from it"} and not found.derives
    assert len(found.moves) == 1 and not found.not_held, "it is found in the model all the same"


class Doubling(Pair):
    """Writes a tensor that is given alone otherwise."""

    def load_weights(self, weights: Weights) -> None:
        given = dict(weights)
        for name, tensor in given.items():
            getattr(self, name).data.copy_(tensor if name == "b" else tensor + len(given))


def test_what_is_loaded_otherwise_alone_is_never_loaded_alone() -> None:
    found = found_of(Doubling(), pair())
    assert left_of(found)["b"] == "given alone, the model loads it otherwise" and not unwritten(found)


class Kept(Pair):
    """What no load writes keeps its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("normalizer", torch.full((8,), 7.0))
        self.register_buffer("cache", torch.full((8,), 9.0), persistent=False)

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor + 1)


def test_what_no_load_writes_is_as_it_was() -> None:
    model = Kept()
    found = found_of(model, pair())
    assert [(kept.name, kept.buffer, wrote) for kept, wrote, _ in unwritten(found)] == [("normalizer", True, 0)]
    assert bool((model.normalizer == 7).all()) and bool((model.cache == 9).all())


class Rebinding(Pair):
    """Makes a buffer of a parameter, another each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one_more", torch.zeros(LENGTH, dtype=BF16), persistent=False)

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)
            if name == "a":
                self.one_more = self.a.data + 1


def test_a_tensor_that_others_are_made_of_is_loaded_by_the_model() -> None:
    model = Rebinding()
    found, _, unfixed = introduce(Engine(model, 0), pair(), {}, CPU)
    assert left_of(found) == {"a": "its load computes from it"} and unfixed == {"one_more"}
    receiver = Receiver(model)
    for number in (1.0, 2.0):
        receiver.sync(number, number)
        assert torch.equal(model.one_more, model.a + 1)
    assert receiver.introduced == 1, "what is laid out otherwise every time is no new layout"


class Laying(Pair):
    """Takes what it is given as it is."""

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "b" and not tensor.is_meta:
                self.b.data = tensor.clone()
            else:
                getattr(self, name).data.copy_(tensor)


def test_a_model_that_lays_parameters_out_every_time_is_exact() -> None:
    found = found_of(Laying(), pair())
    assert set(left_of(found).values()) == {"its load lays b out again"} and not unwritten(found)
    receiver = Receiver(Laying())
    for number in (1.0, 2.0, 3.0):
        receiver.sync(number, number + 1)
    assert receiver.introduced == 1


class Model(torch.nn.Module):
    """Buffers that are loaded by one function each."""

    def __init__(self, loads: dict[str, Any]) -> None:
        super().__init__()
        self.loads = loads
        for name in loads:
            self.register_buffer(name, torch.zeros(4, dtype=FP32 if name == "wide" else BF16))

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.loads[name](getattr(self, name), tensor)


@pytest.mark.parametrize("sent", [BF16, FP32])
def test_the_widest_dtype_of_which_a_load_makes_anything(sent: torch.dtype) -> None:
    def in_place(target: torch.Tensor, tensor: torch.Tensor) -> None:
        tensor += 1  # as SGLang's Gemma does
        target.copy_(tensor)

    loads = {
        "a": torch.Tensor.copy_,
        "in_place": in_place,
        "moved": lambda target, tensor: target.copy_(tensor.clone()),
        "one_more": lambda target, tensor: target.copy_(tensor + 1),
        "read": lambda target, tensor: target.fill_(tensor[0].item()),
        "wide": torch.Tensor.copy_,
    }
    found = found_of(Model(loads), [Source(name, sent, (4,), None) for name in loads])
    moved = str(sent).removeprefix("torch.")
    expected = {"a": "bfloat16", "wide": "float32", "moved": moved, "one_more": "", "in_place": "", "read": ""}
    assert wire_dtypes(list(loads), [found]) == expected


def test_a_load_that_always_raises_leaves_everything_unknown() -> None:
    class Raising(Pair):
        def load_weights(self, weights: Weights) -> None:
            raise KeyError("model.layers.4")

    assert "KeyError: 'model.layers.4'" in found_of(Raising(), pair()).unknown


class Crowded(Pair):
    """Its device is full the first times that it is given marks."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.full = times

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            if not tensor.is_meta and len(tensor.unique()) > 1 and self.full:  # weights are all alike here
                self.full -= 1
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 4 GiB. {self.full} MiB is free")
            getattr(self, name).data.copy_(tensor)


def test_too_little_memory_for_marks_leaves_that_sync_alone_to_the_model() -> None:
    found = found_of(Crowded(), pair())
    assert "no device memory for a load of marks" in found.no_room and set(left_of(found)) == {"a", "b"}
    assert not found.unknown and not unwritten(found)
    receiver = Receiver(Crowded())
    receiver.sync(1.0, 2.0)
    assert receiver.load.map.no_room and receiver.load.replayed == (0, 0)
    receiver.sync(3.0, 4.0)
    assert not receiver.load.map.no_room and receiver.load.replayed[0] == 2


def test_a_device_that_stays_full_is_tried_a_few_times_and_tells_its_map_once() -> None:
    model = Crowded(1000)
    receiver = Receiver(model)
    maps = set()
    for sync in range(15):
        receiver.sync(float(sync), 1.0)
        maps.add(receiver.load.map.digest)
    assert receiver.load.map.no_room == "no device memory for a load of marks: Tried to allocate 4 GiB"
    assert len(maps) == 1 and 1000 - model.full == 1 + MOST_TRIES


def test_a_fused_pair_is_left_together() -> None:
    names = ("two.kv_a_proj_with_mqa.weight", "two.q_a_proj.weight")

    class Fusing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = torch.nn.ParameterList(torch.empty(8, 64) for _ in names)

        def load_weights(self, weights: Weights) -> None:
            for name, tensor in weights:
                self.held[names.index(name)].data.copy_(tensor + 1 if name == names[0] else tensor)

    found = found_of(Fusing(), [Source(name, FP32, (8, 64), None) for name in names], SGLangModel)
    assert len(found.left) == 2 and {left.why for left in found.left} == {"goes through aten.add.Tensor"}


# Tensors that SGLang's models rightly leave alone


def test_what_an_engine_rightly_leaves_alone() -> None:
    assert why_skipped(None, "model.layers.0.self_attn.rotary_emb.inv_freq", ())
    assert not why_skipped(None, "z", ())


def test_layers_that_predict_further_tokens_may_be_left_alone() -> None:
    """They are known by what only they have, so no layer of the trainer's own is taken for one, however many it has."""
    for layer in ("model.layers.4.", "model.language_model.layers.9.", "language_model.model.layers.61."):
        sent = (f"{layer}eh_proj.weight", f"{layer}mlp.up_proj.weight")
        assert all(why_skipped(None, name, sent) for name in sent)
        assert not why_skipped(None, sent[1], sent[1:])
        assert not why_skipped(None, "model.layers.3.mlp.up_proj.weight", sent)
    for name in ("model.mtp_layers.0.mlp.up_proj.weight", "mtp.fc.weight"):
        assert why_skipped(None, name, ())
    assert not why_skipped(None, "model.visual.layers.9.mlp.up_proj.weight", ())


def test_a_vision_tower_may_be_left_alone_by_an_engine_without_one() -> None:
    for name in ("vision_model.class_embedding", "multi_modal_projector.linear_1.weight"):
        blind = {has: why_skipped(SimpleNamespace(has_vision=has), name, ()) for has in (False, None, True)}
        assert blind[False] and blind[None] and not blind[True] and not why_skipped(SimpleNamespace(), name, ())
