# SPDX-License-Identifier: Apache-2.0
"""Tensors that do not lie in memory in the order of their indices arrive as ``state_dict()`` has them.

FSDP1 keeps such a parameter in the order of its memory. FSDP2 refuses such parameters itself; its buffers may be so.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from lora_models import Layout as PEFTLayout
from lora_models import Variant, deliver, merging_source, peft_model
from lora_models import shard as shard_adapted
from models import build
from test_lora_merge import assert_within_one_ulp, peft_merge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from worlds import run_world

from contract.fsdp_layouts import Layout, open_source, shard, torchs_own_state
from contract.test_fsdp_sources import LARGE, TINY, check_arrival, expected_on_the_wire, one_sync
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.trainers.base import WirePolicy
from verl_sync_plugin.trainers.fsdp1 import FSDP1Source

FSDP1 = [
    Layout((world,), strategy, original)
    for world, strategy in ((1, "FULL_SHARD"), (2, "FULL_SHARD"), (2, "NO_SHARD"))
    for original in (True, False)
]


def permuted(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The same values, in memory with the dimensions in another order."""
    back = [order.index(dim) for dim in range(len(order))]
    return tensor.detach().permute(order).contiguous().permute(back)


def strided_model() -> Any:
    model: Any = build("qwen2")
    first = model.model.layers[0]
    for module in (first.self_attn.q_proj, first.mlp.down_proj, model.model.embed_tokens, model.lm_head):
        module.weight = torch.nn.Parameter(permuted(module.weight, [1, 0]))
    table = torch.randn(5, 5)
    first.register_buffer("table", permuted(torch.randn(2, 3, 4), [2, 0, 1]))
    first.register_buffer("square", table)
    first.register_buffer("turned", table.t())  # the same memory, read the other way
    return model


def strided_syncs(layout: Layout) -> None:
    model = strided_model()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    module = shard(model, layout)
    source = open_source(module, layout, "qwen2")
    for _ in range(2):
        expected = expected_on_the_wire(torchs_own_state(module), parameters, layout, "qwen2")
        for bucket_bytes, sharded in ((TINY, False), (LARGE, False), (TINY, True)):
            got, _ = one_sync(module, source, bucket_bytes, sharded)
            check_arrival(got, expected)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.25)


@pytest.mark.parametrize("layout", FSDP1, ids=str)
def test_fsdp1_parameters_arrive_as_the_state_dict_has_them(layout: Layout) -> None:
    run_world(layout.size, strided_syncs, layout)


class Odd(torch.nn.Module):
    """Parameters of random shapes, in memory in random order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chosen = random.Random(seed)
        torch.manual_seed(seed)
        for number in range(6):
            shape = [chosen.choice((1, 2, 3, 5)) for _ in range(chosen.randint(1, 4))]
            order = chosen.sample(range(len(shape)), len(shape))
            self.register_parameter(f"p{number}", torch.nn.Parameter(permuted(torch.randn(shape), order)))


def odd_syncs(world: int, original: bool) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for seed in range(40):
        module = FullyShardedDataParallel(
            Odd(seed), device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=original
        )
        source = FSDP1Source(module, WirePolicy(torch.float32), lambda pairs: iter(pairs), lambda state: state)
        got, _ = one_sync(module, source, 64)
        check_arrival(got, torchs_own_state(module))


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_any_shape_in_any_order_arrives(world: int, original: bool) -> None:
    run_world(world, odd_syncs, world, original)


def gapped() -> str:
    """Every second column of a matrix: FSDP1 keeps the wrong elements of it, and reads into the next parameter."""
    module = torch.nn.Sequential(torch.nn.Linear(6, 4, bias=False), torch.nn.Linear(9, 9))
    module[0].weight = torch.nn.Parameter(torch.randn(4, 12)[:, ::2])
    mesh = init_device_mesh("cpu", (2,))
    wrapped = FullyShardedDataParallel(module, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True)
    source = FSDP1Source(wrapped, WirePolicy(torch.float32), lambda pairs: iter(pairs), lambda state: state)
    with pytest.raises(ValueError) as caught:
        source.shards()
    return str(caught.value)


def buffers_of_fsdp2() -> None:
    model = build("qwen2")
    first = model.model.layers[0]
    table = torch.randn(5, 5)
    first.register_buffer("table", permuted(torch.randn(2, 3, 4), [2, 0, 1]))
    first.register_buffer("square", table)
    first.register_buffer("turned", table.t())
    layout = Layout((2,))
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    module = shard(model, layout)
    expected = expected_on_the_wire(torchs_own_state(module), parameters, layout, "qwen2")
    got, _ = one_sync(module, open_source(module, layout, "qwen2"), LARGE)
    check_arrival(got, expected)


def test_fsdp2_buffers_arrive_as_the_state_dict_has_them() -> None:
    run_world(2, buffers_of_fsdp2)


def refused_by_fsdp2() -> str:
    module = torch.nn.Linear(6, 4, bias=False)
    module.weight = torch.nn.Parameter(permuted(module.weight, [1, 0]))
    with pytest.raises(NotImplementedError) as caught:
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return str(caught.value)


def test_what_is_not_read_in_the_order_of_memory_is_refused() -> None:
    assert all("non-contiguous" in text for text in run_world(2, refused_by_fsdp2)), "then FSDP2Source must do it"
    for text in run_world(2, gapped):
        assert "parameter '0.weight' has strides (12, 2)" in text and "contiguous()" in text


TIED = Variant("one-adapter", "qwen2_tied", {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True})


def factors_of_both_ends(layout: PEFTLayout) -> None:
    """PEFT makes the head's factors transposed views of the embedding's; in FSDP1 each is a parameter of its own."""
    reference = peft_model(TIED)
    head: Any = reference.get_output_embeddings()
    del head.kwargs["tied_adapter"]  # what it would be tied with has a graph, which cannot be copied
    module = shard_adapted(peft_model(TIED), layout)
    source = merging_source(module, TIED.model)
    for bucket_bytes in (9_001, 64 << 20):
        state = {name: tensor.clone() for name, tensor in torchs_own_state(module).items()}
        expected = peft_merge(reference, state)
        got = deliver(source, bucket_bytes)
        assert sorted(got) == sorted(expected)
        for name, tensor in expected.items():
            assert_within_one_ulp(name, got[name], tensor)
        with torch.no_grad():
            for number, parameter in enumerate(module.parameters()):
                parameter.mul_(1 + number / 16)
    assert not torch.equal(got["lm_head.weight"], got["model.embed_tokens.weight"]), "they have become two weights"


@pytest.mark.parametrize("layout", [PEFTLayout((1,), True), PEFTLayout((2,), True)], ids=str)
def test_transposed_factors_are_merged_right(layout: PEFTLayout) -> None:
    run_world(layout.size, factors_of_both_ends, layout)


def adapted_and_transposed() -> str:
    model = peft_model(Variant("plain", config={"target_modules": ["q_proj"]}))
    layer: Any = model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj.base_layer")
    layer.weight = torch.nn.Parameter(permuted(layer.weight, [1, 0]), requires_grad=False)
    module = shard_adapted(model, PEFTLayout((2,), True))
    served = merging_source(module, "qwen2", merge=False)
    plan_buckets(tuple(part.base for part in served.shards()), LARGE)  # the base as it is
    with pytest.raises(ValueError) as caught:
        merging_source(module, "qwen2").shards()
    return str(caught.value)


def test_an_adapted_weight_in_another_order_is_refused_by_name() -> None:
    for text in run_world(2, adapted_and_transposed):
        assert "'model.layers.1.self_attn.q_proj.weight'" in text and "strides (1, " in text
