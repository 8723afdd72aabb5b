# SPDX-License-Identifier: Apache-2.0
"""FSDP and FSDP2 sources: what arrives at the engine is, bit for bit, what the model's own state dict holds."""

import itertools
import random
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from verl.workers.engine.fsdp.transformer_impl import unfuse_moe_params
from worlds import on_ranks

from contract import fsdp_models
from contract.fsdp_models import CONFIGS, KEEP, LAYOUTS, Layout, build, fsdp1, open_source, shard, torchs_own_state
from contract.reading import CPU, LARGE, TINY, State, check_same, check_syncs, sync
from contract.sources import raised_alike


def parameters_of(model: torch.nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


def on_the_wire(state: State, parameters: set[str], model_type: str = "qwen2") -> State:
    """The HF tensors that must arrive: bf16, except buffers and kept names."""
    kept = {name for name in parameters if any(re.search(pattern, name) for pattern in KEEP)}
    assert kept and parameters - kept, "the case must have both kinds"
    wire = {name: t.bfloat16() if name in parameters - kept else t for name, t in state.items()}
    found = dict(unfuse_moe_params(wire.items(), model_type))
    head = found.pop("lm_head.weight")
    # A tied head travels as the embedding alone, as in a checkpoint
    return found if torch.equal(head, found["model.embed_tokens.weight"]) else {**found, "lm_head.weight": head}


def cases() -> Iterator[Any]:
    """Every model under every layout; ``make test`` runs one under each, in turn, and experts under every other one."""
    others = sorted(CONFIGS.keys() - {"qwen3_moe"})
    for number, layout in enumerate(LAYOUTS):
        for name in sorted(CONFIGS):
            runs = name == others[number % len(others)] or (name == "qwen3_moe" and number % 2 == 0)
            yield pytest.param(layout, name, id=f"{layout}-{name}", marks=() if runs else pytest.mark.extended)


@pytest.mark.parametrize(("layout", "model_name"), list(cases()))
@on_ranks("layout", timeout=180)
def test_every_tensor_arrives_bit_for_bit(layout: Layout, model_name: str) -> None:
    """With training in between; the first sync comes before FSDP1 has initialised itself, as verl's does."""
    model = build(model_name)
    state: State = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters, module = parameters_of(model), shard(model, layout)
    optimizer, steps = torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.5), itertools.count()

    def train() -> None:
        fsdp_models.train_step(module, optimizer, next(steps))
        trained = torchs_own_state(module)
        unchanged = [name for name, tensor in trained.items() if torch.equal(tensor, state[name])]
        assert unchanged == [], "training must have changed everything"
        state.update(trained)

    def expected() -> State:
        return on_the_wire(state, parameters, CONFIGS[model_name].model_type)

    reader = check_syncs(open_source(module, *KEEP), expected, train, [module])
    assert "scratch" not in expected()
    for bucket_bytes, torn in ((TINY, True), (LARGE, False)):
        reader.shards(bucket_bytes)
        names = [entry.name for bucket in reader.plan.buckets for entry in bucket.entries]  # type: ignore[union-attr]
        assert (len(names) > len(set(names))) == torn


@on_ranks(2)
def test_sync_after_a_forward_that_raised() -> None:
    """The root stays gathered then; what is sent are the shards all the same."""
    layout, model = Layout((2,)), build("qwen2")
    parameters = parameters_of(model)
    expected = on_the_wire({name: tensor.clone() for name, tensor in model.state_dict().items()}, parameters)
    module: Any = shard(model, layout)
    source = open_source(module, *KEEP)
    sync(source)
    hook = module.model.layers[-1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module(input_ids=torch.arange(8).reshape(1, 8))
    hook.remove()
    assert not isinstance(module.model.embed_tokens.weight, DTensor), "the root is not gathered"
    check_same(sync(source), expected)


def permuted(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The same values, in memory with the dimensions in another order."""
    back = [order.index(dim) for dim in range(len(order))]
    return tensor.detach().permute(order).contiguous().permute(back)


class Odd(torch.nn.Module):
    """Parameters of random shapes, in memory in random order, unless ``plain``; buffers so, too."""

    config = SimpleNamespace(model_type="none")

    def __init__(self, seed: int, plain: bool) -> None:
        super().__init__()
        chosen = random.Random(seed)
        torch.manual_seed(seed)
        for number in range(6):
            shape = [chosen.choice((1, 2, 3, 5)) for _ in range(chosen.randint(1, 4))]
            order = range(len(shape)) if plain else chosen.sample(range(len(shape)), len(shape))
            self.register_parameter(f"p{number}", torch.nn.Parameter(permuted(torch.randn(shape), [*order])))
        square = torch.randn(5, 5)
        self.register_buffer("table", permuted(torch.randn(2, 3, 4), [2, 0, 1]))
        self.register_buffer("square", square)
        self.register_buffer("turned", square.t())  # the same memory, read the other way


@pytest.mark.parametrize("layout", [
    Layout((2,)),
    *(fsdp1(world, original) for world in (1, 2) for original in (True, False)),
    *(fsdp1(2, original, "NO_SHARD") for original in (True, False)),
], ids=str)  # fmt: skip
@on_ranks("layout")
def test_any_shape_in_any_order_of_memory_arrives_as_the_state_dict_has_it(layout: Layout) -> None:
    """FSDP1 keeps a parameter in the order of its memory. FSDP2 refuses such parameters; its buffers may be so."""
    for seed in range(24):
        module = shard(Odd(seed, plain=not layout.strategy), layout)
        source, given = open_source(module), ((64, False), (LARGE, False), (64, True))[seed % 3]
        for _ in range(2):  # before torch looks, which takes new memory of parameters over
            found, state = sync(source, *given), torchs_own_state(module)
            check_same(found, {n: t.bfloat16() if n.startswith("p") else t for n, t in state.items()})
            for parameter in module.parameters() if layout.use_orig_params or not layout.strategy else ():
                if parameter.is_contiguous():  # FSDP1 itself takes no others over
                    parameter.data = parameter.data + 1


@pytest.mark.parametrize("original", [True, False])
@on_ranks(2)
def test_parameters_that_fsdp1_ignores_travel_too(original: bool) -> None:
    model = Odd(3, plain=True)
    expected = {n: t.bfloat16() if n.startswith("p") else t.clone() for n, t in model.state_dict().items()}
    module = FullyShardedDataParallel(model, ignored_states=[model.p1], device_id=CPU, use_orig_params=original)
    check_same(sync(open_source(module)), expected)


@on_ranks(2)
def test_what_cannot_be_read_is_refused_by_name() -> None:
    """FSDP1 keeps the wrong elements of every second column of a matrix, and reads into the next parameter."""
    mesh = init_device_mesh("cpu", (2,))
    gapped = torch.nn.Sequential(torch.nn.Linear(6, 4, bias=False), torch.nn.Linear(9, 9))
    gapped[0].weight = torch.nn.Parameter(torch.randn(4, 12)[:, ::2])
    odd = torch.nn.Linear(6, 6, bias=False)
    fully_shard(odd, mesh=mesh, shard_placement_fn=lambda _: torch.distributed.tensor.Shard(1))
    gapped.config = odd.config = Odd.config  # type: ignore[assignment]
    for source, *words in (
        (open_source(shard(gapped, fsdp1(2, True))), "parameter '0.weight' has strides (12, 2)", "contiguous()"),
        (open_source(odd), "parameter 'weight' has placements (Shard(dim=1),)", "enabled=False to run stock"),
    ):
        text = raised_alike(ValueError, source.shards)
        assert all(each in text for each in words), text
