# SPDX-License-Identifier: Apache-2.0
"""Checks what an engine rank finds out about odd loads of small models, and that syncs are exact all the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from receiving import BF16, Sender, Tensors, Weights, map_of

from verl_sync_plugin.layout.load_map import LoadMap, unwritten, wire_dtypes
from verl_sync_plugin.rollouts.sglang.model import SGLangModel

FP32, LENGTH = torch.float32, 64
HALF = LENGTH // 2
Load = Callable[[Any, Tensors], object]


class Pair(torch.nn.Module):
    """Two parameters, ``a`` and ``b``, loaded by one function, and buffers."""

    def __init__(self, load: Load, **buffers: torch.Tensor) -> None:
        super().__init__()
        self._load = load
        for name in ("a", "b"):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(LENGTH, dtype=BF16), requires_grad=False))
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=name != "one_more")

    def load_weights(self, weights: Weights) -> None:
        self._load(self, dict(weights))


def found_of(model: torch.nn.Module) -> LoadMap:
    return map_of(model, "ab", (LENGTH,))


def left_of(found: LoadMap) -> dict[str, str]:
    return {"ab"[left.tensor]: left.why for left in found.not_copied}


def each(put: Callable[[Any, str, torch.Tensor], object]) -> Load:
    """One tensor after another."""
    return lambda model, given: [put(model, name, tensor) for name, tensor in given.items()]


def own(model: Any, name: str, tensor: torch.Tensor) -> None:
    getattr(model, name).data.copy_(tensor)


def layered(model: Any, name: str, tensor: torch.Tensor) -> None:
    """Both are written to one parameter; the one that comes first is changed on its way."""
    model.a.data[: HALF if name == "b" else LENGTH].copy_(tensor + 1 if name == "a" else tensor[:HALF])


def random(model: Any, name: str, tensor: torch.Tensor) -> None:
    """Takes ``a`` alone; writes other random numbers to the other parameter each time."""
    model.a.data.copy_(tensor) if name == "a" else model.b.data.random_(0, 99)


def laying(model: Any, name: str, tensor: torch.Tensor) -> None:
    """A tensor is taken as it is given."""
    if name == "b" and not tensor.is_meta:
        model.b.data = tensor.clone()
    else:
        own(model, name, tensor)


def sparing(model: Any, name: str, tensor: torch.Tensor) -> None:
    """A tensor is taken only when it is given without values."""
    if name == "a" or tensor.is_meta:
        own(model, name, tensor + 1)


def rebinding(model: Any, name: str, tensor: torch.Tensor) -> None:
    """A buffer is made of a parameter, another each time."""
    own(model, name, tensor)
    if name == "a":
        model.one_more = model.a.data + 1


def joined(model: Any, given: Tensors) -> None:
    """What is joined is changed in place before it is copied."""
    model.a.data.view(1, -1).copy_(torch.cat([given["a"][:HALF], given["b"][:HALF]]).unsqueeze_(0))


COMPUTES, MORE = "its load computes from it", "is written where the load writes more than it"


@pytest.mark.parametrize(("load", "left", "missing", "exact"), [
    (each(layered), {"a": "goes through aten.add.Tensor", "b": MORE}, ["b"], False),
    (each(random), {}, [], False),
    (each(rebinding), {"a": COMPUTES}, [], True),
    (joined, dict.fromkeys("ab", "goes through aten.unsqueeze_.default"), ["b"], False),
])  # fmt: skip
def test_left_to_the_model(load: Load, left: dict[str, str], missing: list[str], exact: bool) -> None:
    """A load that lays tensors out otherwise every time is exact, and makes no new layout."""
    model, sender = Pair(load, one_more=torch.zeros(LENGTH, dtype=BF16)), Sender([("a",), ("b",)], (LENGTH,))
    receiver, maps = sender.receiver(model), set[int]()
    for seed in range(3 if exact else 1):
        sent = sender.train(seed)
        sender.staged(receiver)
        maps.add(id(receiver.map))
        assert not exact or all(torch.equal(getattr(model, name).data, tensor) for name, tensor in sent.items())
        assert COMPUTES not in left.values() or torch.equal(model.one_more.data, model.a.data + 1)
    assert len(maps) == 1
    assert receiver.map.why_own_load and left_of(receiver.map) == left and not receiver.map.constants
    assert [kept.name for kept, *_ in unwritten(receiver.map) if not kept.buffer] == missing


class Deriving(Pair):
    """Makes an attribute of a parameter, another each time, as SGLang's KimiLinear does."""

    def load_weights(self, weights: Weights) -> None:
        super().load_weights(weights)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.made = self.a.data.view(8, -1).T.contiguous().T + 1


@pytest.mark.parametrize("derives", [True, False])
def test_what_a_load_makes_lies_where_graphs_read_it(derives: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not derives:  # a load that cannot be derived from alone
        monkeypatch.setattr(SGLangModel, "can_derive", False)
    model, sender = Deriving(each(own)), Sender([("a",), ("b",)], (LENGTH,))
    model.post_load_weights()
    receiver, captured = sender.receiver(model), model.made
    for seed in range(3):
        receiver.begin()  # of a sync that failed once it was loaded
        model.post_load_weights()
        sent = sender.train(seed)
        sender.staged(receiver)
        assert receiver.map.derives == derives and bool(receiver.map.why_own_load) != derives
        assert model.made.data_ptr() == captured.data_ptr() and torch.equal(captured.reshape(-1), sent["a"] + 1)


class Folding(Pair):
    # As SGLang's Gemma 4 does since 0.5.13, and PaddleOCR-VL since 0.5.20
    _scale_fused = False

    def fuse_scale(self) -> None:
        self.one_more.copy_(self.a * 2)
        self._scale_fused = True

    def forward(self, size: int) -> torch.Tensor:
        if not self._scale_fused:
            self.fuse_scale()
        self.cache_position_count[size] = 1
        return self.one_more[:size] + self.cache_position_embedding.setdefault(size, self.b[:size].clone())


def test_what_forwards_keep_is_made_again_of_what_is_sent() -> None:
    model, sender = Folding(each(own), one_more=torch.zeros(LENGTH, dtype=BF16)), Sender([("a",), ("b",)], (LENGTH,))
    model.__dict__.update(cache_position_embedding={}, cache_position_count={})
    receiver = sender.receiver(model)
    for seed in range(3):
        sent = sender.train(seed)
        sender.staged(receiver)
        assert torch.equal(model(HALF), sent["a"][:HALF] * 2 + sent["b"][:HALF])


def test_an_attribute_that_a_load_makes_larger_is_refused() -> None:
    model = Pair(lambda model, given: setattr(model, "made", torch.zeros(len(model.made) + 1)))
    model.made = torch.zeros(1)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"a load gives 'made' another shape or dtype.*enabled=False"):
        found_of(model)


@pytest.mark.parametrize(
    ("load", "why"), [(laying, "lays b out again with real tensors"), (sparing, "does not write b with real tensors")]
)
def test_a_load_that_does_not_do_what_was_recorded_is_an_error(load: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"load of Pair {why}"):
        found_of(Pair(each(load)))


def test_a_tensor_that_is_computed_with_and_dropped_is_not_used() -> None:
    def load(model: Any, name: str, tensor: torch.Tensor) -> None:
        changed = tensor + 1
        if name == "a":
            own(model, name, changed)

    assert {left.tensor: left.takes for left in found_of(Pair(each(load))).not_copied} == {0: ((0, LENGTH),), 1: ()}


def test_constants_are_what_lasts_of_them() -> None:
    def load(model: Any, name: str, tensor: torch.Tensor) -> None:
        getattr(model, name).data.fill_(3)
        getattr(model, name).data[8:].copy_(tensor[8:])

    found = found_of(Pair(each(load)))
    assert not found.not_copied and not unwritten(found)
    held = sorted((each.storage, each.spans, len(each.bits)) for each in found.constants)
    assert held == [(0, ((0, 16),), 2), (1, ((0, 16),), 2)]


@pytest.mark.parametrize("value", [0, 1])
def test_a_weight_that_equals_its_ground_is_no_constant(value: int) -> None:
    """Marks of one bit do so every other time."""
    load = each(lambda model, name, tensor: model.flag.fill_(value).copy_(tensor))
    found = map_of(Pair(load, flag=torch.zeros(4, dtype=torch.bool)), ["flag"], (4,), torch.bool)
    assert not found.constants and not found.not_copied and len(found.moves) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("derive", [lambda a: a.to(torch.float32), lambda a: a.t().reshape(-1)])
def test_what_a_model_derives_is_seen_in_either_mode(mode: Any, derive: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """By an operation that counts as a view in inference mode."""
    kept = list[torch.Tensor]()
    load = each(lambda model, name, tensor: kept.append(derive(model.one.copy_(tensor))))
    deriving = Pair(load, one=torch.zeros(8, 16, dtype=BF16))
    with mode():
        found = map_of(deriving, ["one"], (8, 16))
    assert left_of(found) == {"a": COMPUTES} and not found.derives
    assert len(found.moves) == 1 and not found.unplaced, "it is found in the model all the same"


@pytest.mark.parametrize("sent", [BF16, FP32])
def test_the_widest_dtype_of_which_a_load_makes_anything(sent: torch.dtype) -> None:
    loads = {
        "copied": torch.Tensor.copy_,
        "in_place": lambda target, tensor: target.copy_(tensor.add_(1)),  # as SGLang's Gemma does
        "moved": lambda target, tensor: target.copy_(tensor.clone()),
        "plus": lambda target, tensor: target.copy_(tensor + 1),
        "read": lambda target, tensor: target.fill_(tensor[0].item()),
        "wide": torch.Tensor.copy_,
    }
    buffers = {name: torch.zeros(4, dtype=FP32 if name == "wide" else BF16) for name in loads}
    model = Pair(each(lambda model, name, tensor: loads[name](getattr(model, name), tensor)), **buffers)
    found = map_of(model, loads, (4,), sent)
    moved = str(sent).removeprefix("torch.")
    expected = {"copied": "bfloat16", "wide": "float32", "moved": moved, "plus": "", "in_place": "", "read": ""}
    assert wire_dtypes(list(loads), [found]) == expected


def test_a_load_that_raises_is_named() -> None:
    def raises(model: Any, given: Tensors) -> None:
        raise KeyError("model.layers.4")

    with pytest.raises(ValueError, match=r"SGLang's Pair: its load cannot be recorded: KeyError: 'model.layers.4'"):
        found_of(Pair(raises))


def test_marks_for_which_there_is_no_memory_are_tried_again_in_the_next_sync() -> None:
    full = [True]

    def crowded(model: Any, given: Tensors) -> None:
        if full[0] and not given["a"].is_meta:
            full[0] = False
            raise torch.OutOfMemoryError("CUDA out of memory")
        each(own)(model, given)

    sender = Sender([("a",), ("b",)], (LENGTH,))
    load = sender.receiver(Pair(crowded))
    with pytest.raises(RuntimeError, match=r"no device memory .*multi_stage_wake_up"):
        load.begin()
    sender.staged(load)
    assert load.replayed == 2 and not unwritten(load.map)


def skips(name: str, *sent: str, **of_model: Any) -> bool:
    """True if a map says so; ``sent`` comes with it."""
    model, names = Pair(lambda model, given: None), sorted({name, *sent})
    vars(model).update(of_model)
    return names.index(name) in dict(map_of(model, names, (4,)).skipped)


def test_layers_that_predict_further_tokens_may_be_left_alone() -> None:
    """They are known by what only they have, so no layer of the trainer's own is taken for one, however many it has."""
    for layer in ("model.layers.4.", "model.language_model.layers.9.", "language_model.model.layers.61."):
        joins, other = f"{layer}eh_proj.weight", f"{layer}mlp.up_proj.weight"
        assert skips(joins, other) and skips(other, joins) and not skips(other)
        assert not skips("model.layers.3.mlp.up_proj.weight", joins, other)
    for name in ("rotary_emb.inv_freq", "mtp_layers.0.mlp.up_proj.weight"):
        assert skips(f"model.{name}")
    assert skips("mtp.fc.weight") and not skips("z") and not skips("model.visual.layers.9.mlp.up_proj.weight")


@pytest.mark.parametrize("name", ["vision_model.class_embedding", "multi_modal_projector.linear_1.weight"])
def test_a_vision_tower_may_be_left_alone_by_an_engine_without_one(name: str) -> None:
    assert skips(name, has_vision=False) and skips(name, has_vision=None)
    assert not skips(name, has_vision=True) and not skips(name)
