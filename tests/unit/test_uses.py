# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a tensor a load uses, against sets of single bytes; and what the ranks of an engine leave out."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from verl_sync_plugin.copies.hulls import numbers_of
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Base, View
from verl_sync_plugin.receiver.intervals import intervals, meet, region_of, union
from verl_sync_plugin.receiver.recording import Copy, Recording, Source
from verl_sync_plugin.receiver.uses import own_runs, readings_of_uses, uses_in
from verl_sync_plugin.rollouts.sglang.model import why_skipped
from verl_sync_plugin.transport.protocol import Used
from verl_sync_plugin.verify.uses import left_out


def view_of(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Some slices and permutations of a tensor, and perhaps a broadcast one."""
    for _ in range(rng.randrange(4)):
        dim = rng.randrange(tensor.dim())
        match rng.randrange(4):
            case 0:
                start = rng.randrange(tensor.shape[dim])
                tensor = tensor.narrow(dim, start, rng.randint(1, tensor.shape[dim] - start))
            case 1:
                tensor = tensor.transpose(dim, rng.randrange(tensor.dim()))
            case 2:
                tensor = tensor[(*[slice(None)] * dim, slice(None, None, 2))]
            case 3:
                tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
    return tensor


def bytes_of(view: torch.Tensor) -> set[int]:
    elements = torch.arange(10_000).as_strided(view.shape, view.stride(), view.storage_offset()).flatten().tolist()
    return {byte for e in elements for byte in range(e * view.element_size(), (e + 1) * view.element_size())}


def covered(runs: Iterable[Run]) -> set[int]:
    return {run.source + i * run.source_stride + b for run in runs for i in range(run.count) for b in range(run.width)}


@pytest.mark.parametrize("seed", range(200))
def test_the_bytes_of_copies(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 4)))
    source = Source("a", rng.choice([torch.bfloat16, torch.float32]), shape, None)
    views = [view_of(source.meta(), rng) for _ in range(rng.randint(1, 3))]
    uses = uses_in(Recording([Copy("a", view, view) for view in views], ended=True), [source])
    assert uses is not None
    assert covered(uses["a"]) == set().union(*(bytes_of(view) for view in views))


@pytest.mark.parametrize("seed", range(100))
def test_intervals_and_whether_tensors_meet(seed: int) -> None:
    rng = random.Random(seed)
    memory = torch.zeros(rng.randint(2, 6), rng.randint(2, 6), 4, dtype=torch.int16)
    one, other = view_of(memory, rng), view_of(memory, rng)
    first = memory.data_ptr()
    held = {b for low, high in (intervals([region_of(one)]) - first).tolist() for b in range(low, high)}
    assert held == bytes_of(one) and union(intervals([region_of(one)])) == len(held)
    assert meet(one, other) == bool(bytes_of(one) & bytes_of(other))
    assert not meet(one, torch.zeros(3)) and not meet(one[:0], one)


def test_what_is_taken_in_another_way_counts_as_used_and_what_is_not_recorded_is_unknown() -> None:
    sources = [Source(name, torch.float32, (2, 3), None) for name in "abc"]
    refused = dict.fromkeys("ab", "is computed with")
    whole = (Run(0, 0, 24),)
    seen = Recording(refused=refused, taken={"a"}, ended=True)
    assert uses_in(seen, sources) == {"a": whole, "b": (), "c": ()}
    unseen = Recording(refused=refused, spoiled="its load keeps what it was given", ended=True)
    assert uses_in(unseen, sources) == {"a": whole, "b": whole, "c": ()}
    assert uses_in(Recording(spoiled="its load cannot be recorded"), sources) is None


def test_a_tensor_with_gaps_has_only_its_own_bytes() -> None:
    columns = Source("a", torch.bfloat16, (4, 3), (8, 1))
    assert columns.nbytes == 24 and covered(own_runs(columns)) == bytes_of(columns.meta())


def plan_of(names: tuple[str, ...], numel: int = 8) -> tuple[list[Source], list[tuple], dict[str, int]]:  # type: ignore[type-arg]
    """One base under several names, and one of its own."""
    views = tuple(View(name, (numel,), 0, numel) for name in names)
    alone = Base("z", "float32", 4, (numel,), (View("z", (numel,), 0, numel),))
    plan = plan_buckets((Base("tied", "float32", 4, (numel,), views), alone), 1 << 10)
    buckets = [bucket.entries for bucket in plan.buckets]
    return [Source(name, torch.float32, (numel,), None) for name in (*names, "z")], buckets, numbers_of(buckets)


def test_tied_tensors_are_used_together() -> None:
    sources, buckets, numbers = plan_of(("embed", "head"))
    readings = readings_of_uses(
        {"embed": (Run(0, 0, 32),), "head": (), "z": ()}, sources, buckets, numbers, lambda name: ""
    )
    assert readings == ((32, (Run(0, 0, 32),), (0, 1)), (32, (), (2,)))
    assert left_out(3, [Used("M", readings)]) == [(2, 32, 32)]


def test_what_an_engine_rightly_leaves_alone() -> None:
    sources, buckets, numbers = plan_of(("model.layers.0.self_attn.rotary_emb.inv_freq",))
    uses = {source.name: () for source in sources}
    skipped = partial(why_skipped, None, sent=())
    assert left_out(2, [Used("M", readings_of_uses(uses, sources, buckets, numbers, skipped))]) == [(1, 32, 32)]


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


@pytest.mark.parametrize("seed", range(100))
def test_what_the_ranks_of_an_engine_leave_out(seed: int) -> None:
    rng, nbytes = random.Random(seed), 40
    told = []
    for _ in range(rng.randint(1, 4)):
        runs = [Run(rng.randrange(20), 0, rng.randint(1, 4), rng.randint(1, 4), rng.randint(0, 5)) for _ in range(3)]
        told.append(tuple(run for run in runs if max(covered([run])) < nbytes))
    missing = nbytes - len(set().union(*(covered(runs) for runs in told)))
    found = left_out(1, [Used("M", ((nbytes, runs, (0,)),)) for runs in told])
    assert found == ([(0, missing, nbytes)] if missing else [])
    assert left_out(1, []) == [(0, 0, 0)], "a tensor that nobody speaks of is left out"
