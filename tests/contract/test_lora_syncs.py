# SPDX-License-Identifier: Apache-2.0
"""Covers LoRA over many syncs, merged and served: what is held, and ranks that fail or stay away."""

import asyncio
import gc
import time
import weakref
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch.distributed import distributed_c10d
from worlds import on_ranks

from contract import fsdp_models
from contract.fsdp_models import Layout, Variant, fsdp1, manager_of, merging_source, peft_model, shard
from contract.reading import LARGE, Reader, sync
from contract.sources import BUCKET_BYTES, StandIn, raised_alike
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.sync.manager import ShardingManager

LINEAR = Variant("all-linear", config={"target_modules": "all-linear"})
ENDS = Variant("embedding", "llama", {"target_modules": ["embed_tokens", "o_proj"]})
FACTOR = "base_model.model.model.layers.0.self_attn.o_proj.lora_A.default.weight"
WEIGHT = "model.layers.0.self_attn.o_proj.weight"
SECONDS, SOON = 3.0, 5.0


def count_collectives(module: torch.nn.Module, gather_bytes: int) -> tuple[list[int], list[int]]:
    """Counts the collectives of each bucket's preparation, and the bytes of factors that are there after it."""
    source = merging_source(module, gather_bytes=gather_bytes)
    reader = Reader(source)
    reader.shards(30_001)
    bases = [bucket.bases for bucket in reader.plan.buckets]  # type: ignore[union-attr]
    counts, held = [], []
    for index, each in enumerate(bases):
        counts.append(sum(1 for _ in source.prepare(each, bases[index + 1 :])))
        weights = [weight for base in each for weight in source.weights_in(base)]
        assert all(source.gathered.keys() >= set(weight.keys) for weight in weights)
        held.append(sum(factor.nbytes for factor in source.gathered.values()))
    source.release()
    assert not source.gathered
    return counts, held


@on_ranks(4)
def test_the_factors_of_several_buckets_are_gathered_at_once_within_bounds() -> None:
    module = shard(peft_model(LINEAR), Layout((2, 2)))
    alone, smallest = count_collectives(module, 0)
    bound = 2 * max(smallest)
    counts, held = count_collectives(module, bound)
    assert max(counts) == 1 and 1 < sum(counts) <= sum(alone) * 2 // 3, (counts, alone)
    assert max(held) <= bound
    counts, _ = count_collectives(module, 1 << 30)
    assert counts == [1] + [0] * (len(counts) - 1)


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "adapter"])
@on_ranks(2)
def test_nothing_of_the_trainer_is_held_between_syncs(merge: bool) -> None:
    """verl replaces every parameter by a copy elsewhere when it offloads: the old one must be free to go."""
    module = shard(peft_model(LINEAR), Layout((2,)))
    source = merging_source(module, merge=merge)
    sync(source, LARGE)
    held = [weakref.ref(parameter._local_tensor.untyped_storage()) for parameter in module.parameters()]  # type: ignore[attr-defined]
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True)
    gc.collect()
    alive = sum(reference() is not None for reference in held)
    assert not alive, f"{alive} of {len(held)} parameters are still held after the sync"


def out_of_memory() -> Any:
    raise torch.OutOfMemoryError("injected: out of memory")


def break_factor(source: Any) -> None:
    """A factor cannot be packed."""
    source.factors.shards[FACTOR] = replace(source.factors.shards[FACTOR], local=out_of_memory)


def first_buckets(manager: ShardingManager, where: str = "") -> None:
    sync, way = manager.plan()
    if where == "begin":
        manager.sender.begin = lambda *_: out_of_memory()  # type: ignore[method-assign]
    elif where:
        break_factor(sync.source)
    way.fill(sync)
    manager.agreement.vote("connecting to the engine", [0, 0])  # what comes next; nobody must meet it in a settle


@pytest.mark.parametrize("where", ["factors", "begin"])
@pytest.mark.parametrize("layout", [Layout((2, 2)), fsdp1(2, True)], ids=str)
@on_ranks("layout", timeout=40)
def test_nobody_is_left_alone_in_a_collective(layout: Layout, where: str) -> None:
    """Where the last rank fails."""
    manager = manager_of(shard(peft_model(ENDS), layout), StandIn(), delivery="staged")
    source, last = manager.open_source(), dist.get_rank() == dist.get_world_size() - 1
    manager.source, honest = source, sync(source, BUCKET_BYTES)
    started = time.monotonic()
    text = raised_alike(SyncError, first_buckets, manager, where if last else "")
    assert time.monotonic() - started < SOON
    assert f"rank {layout.size - 1}: torch.OutOfMemoryError: injected" in text, text
    assert text.count("rank ") == 1 and "failed at 'packing the first buckets'" in text, text
    source.release()
    vars(manager.sender).pop("begin", None)
    first_buckets(manager)
    manager.sender.close()
    again = sync(source, BUCKET_BYTES)
    assert all(torch.equal(honest[name], again[name]) for name in honest), "the next sync shipped something else"


@pytest.mark.usefixtures("fresh_processes")  # after many other tests, one did not get what the other had gathered
@on_ranks(2, timeout=60)
def test_an_absent_rank_is_waited_for_no_longer_than_the_bound() -> None:
    """Whatever the process group's own timeout is; rank 1 leaves before the collective."""
    source = merging_source(shard(peft_model(ENDS), Layout((2,))), seconds=SECONDS)
    work = source.prepare(tuple(range(len(source.shards()))))
    next(work)  # right before the collective
    # All are here, by the store: what goes over the group may be lost when another rank's wait ends
    store = distributed_c10d._get_default_store()
    store.set(f"here: {dist.get_rank()}", "")
    store.wait([f"here: {rank}" for rank in range(2)])
    started = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            next(work, None)
        assert SECONDS * 0.5 < time.monotonic() - started < SECONDS + 1
    else:
        time.sleep(SECONDS + 2)


# The second adapter is not served, and does not travel
TWO = Variant("all-linear", config=LINEAR.config, second={"target_modules": ["q_proj"]})


def serving(module: torch.nn.Module, server: StandIn, wire: str = "bfloat16") -> ShardingManager:
    """The manager of a trainer whose engine serves the adapter, and has its base already."""
    manager = manager_of(module, server, dist.get_rank() == 0, merge=False, wire=wire)
    manager._base_sent = True
    return manager


def failing(manager: ShardingManager) -> str:
    return raised_alike(SyncError, asyncio.run, manager.update_weights([], 0))


@pytest.mark.parametrize("layout", [Layout((1,)), Layout((3,)), fsdp1(2, True)], ids=str)
@on_ranks("layout", timeout=60)
def test_the_engine_gets_pefts_own_adapter(layout: Layout) -> None:
    reference, module, server, leads = peft_model(TWO), shard(peft_model(TWO), layout), StandIn(), dist.get_rank() == 0
    manager = serving(module, server)
    for version in (1, 2, 3):
        report = asyncio.run(manager.update_weights([], version))
        reference.load_state_dict(fsdp_models.torchs_own_state(module))
        expected = get_peft_model_state_dict(reference)
        if leads:
            settings, got = server.adapters[-1]
            assert got.keys() == expected.keys() and len(got) == report.tensors
            assert all(torch.equal(got[name], expected[name].bfloat16()) for name in expected)
            assert settings["r"] == 3 and settings["peft_type"] == "LORA" and report.stages["sleep"] == 0.5
        fsdp_models.change(module)
    source: Any = manager.source
    honest, started = source.shards, time.monotonic()

    def broken() -> Any:
        """This rank comes to the gathering, and has no memory left to pack its part of one factor."""
        found = honest()
        if dist.get_rank() == layout.size - 1:
            break_factor(source)
        return found

    with mock.patch.object(source, "shards", broken):
        assert f"rank {layout.size - 1}: torch.OutOfMemoryError: injected" in failing(manager)
    assert time.monotonic() - started < SOON, "the others waited in the collective"
    server.refuses = True
    assert "rank 0: RuntimeError: SGLang refused the adapter" in failing(manager)
    layer: Any = next(each for each in module.modules() if isinstance(each, LoraLayer))
    layer.scale_layer(0.5)
    assert "is scaled by" in failing(manager)
    layer.scale_layer(2)
    frozen = next(p for n, p in module.named_parameters() if ".lora_" not in n).requires_grad_()
    assert "changes in training, but is no part of the adapter" in failing(manager)
    frozen.requires_grad_(False)
    server.refuses = False
    factor = next(parameter for name, parameter in module.named_parameters() if "lora_A" in name)
    first: torch.Tensor = getattr(factor, "_local_tensor", factor).detach().view(-1)[:1]
    held = first.clone()
    first.fill_(float("nan"))
    assert "lora_A.weight' holds NaN or Inf" in failing(manager)
    first.fill_(1e5)
    narrow = serving(module, server, "float16")
    assert "lora_A.weight' exceeds the range of float16, in which it travels" in failing(narrow)
    first.copy_(held)
    sent = len(server.adapters)
    asyncio.run(manager.update_weights([], 4))
    assert len(server.adapters) == sent + leads
