# SPDX-License-Identifier: Apache-2.0
"""DTensors of any placement, and verl's ``ShardSpec``: what arrives is, bit for bit, the whole tensor."""

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from verl.workers.engine.spec import BlockPlacement, ShardSpec
from worlds import on_ranks

from bare_engine import trainer
from contract import sources
from contract.reading import State, check_syncs
from contract.sources import raised_alike
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.spmd import Given, SpmdShardingManager
from verl_sync_plugin.transport.agreement import Agreement

Export = Callable[[], Any]


def open_source(given: Any) -> Any:
    """The source of what a script trains."""
    live = Given({})
    live.take(given)
    return sources.open_source("", live, r"\.gate\.weight$", backend=SpmdShardingManager.backend)


def of_specs(export: Export) -> Any:
    """The source of an engine of verl's that exports tensors with ``ShardSpec``."""
    config = SimpleNamespace(strategy="torchtitan")
    return open_source(SimpleNamespace(engine_config=config, get_per_tensor_param_shard=lambda: (export(), None)))


def wire(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() and not name.endswith(".gate.weight") else tensor


def mixed_state(meshes: tuple[tuple[int, ...], ...]) -> tuple[State, State]:
    """Whole tensors of uneven sizes, and the same cut in every way over several meshes."""
    torch.manual_seed(3)
    whole: State = {"plain.weight": torch.randn(5, 3), "count": torch.tensor(7), "block.gate.weight": torch.randn(9, 4)}
    cut: State = {name: tensor.clone() for name, tensor in whole.items()}
    for shape in meshes:
        mesh = init_device_mesh("cpu", shape)
        ways = itertools.product((Replicate(), Shard(0), Shard(1), Shard(2)), repeat=mesh.ndim)
        for number, placements in enumerate(ways):
            name = f"mesh{'x'.join(map(str, shape))}.{number}.weight"
            whole[name] = torch.randn(7, 5, 6)
            cut[name] = distribute_tensor(whole[name].clone(), mesh, list(placements))
        router = f"mesh{'x'.join(map(str, shape))}.gate.weight"
        whole[router] = torch.randn(6, 8)
        cut[router] = distribute_tensor(whole[router].clone(), mesh, [Shard(1)] * mesh.ndim)
    return whole, cut


@pytest.mark.parametrize(("size", "meshes"), [(2, ((2,),)), (4, ((4,), (2, 2))), (4, ((1, 4), (4, 1)))], ids=str)
@on_ranks("size", timeout=120)
def test_any_placement_arrives_bit_for_bit(size: int, meshes: tuple[tuple[int, ...], ...]) -> None:
    whole, cut = mixed_state(meshes)

    def change() -> None:
        for name in whole:
            for tensor in (whole[name], cut[name]):
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).mul_(2)

    source = open_source(cut)
    assert type(source).__name__ == "PlacedSource"
    check_syncs(source, lambda: {n: wire(n, t) for n, t in whole.items()}, change)


@on_ranks(4, timeout=120)
def test_fsdp2_over_tensor_parallelism() -> None:
    """As torchtitan does it: ``_StridedShard`` where both cut one dimension."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8, bias=False))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    assert any(isinstance(p, _StridedShard) for t in model.parameters() for p in t.placements)  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def expected() -> State:
        return {name: tensor.full_tensor().detach().bfloat16() for name, tensor in model.state_dict().items()}

    def train() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    check_syncs(open_source(dict(model.state_dict())), expected, train)


@on_ranks(4, timeout=120)
def test_what_verls_engines_export() -> None:
    """Reads torchtitan's stacks, with a slot per expert over two mesh dimensions, and veomni's experts, cut by hand."""
    torch.manual_seed(9)
    stack, fused, dense = torch.randn(4, 6, 5), torch.randn(8, 6, 4), torch.randn(7, 3)
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    cut = distribute_tensor(stack.clone(), mesh, [Shard(0), Shard(1)])
    rows = distribute_tensor(dense.clone(), init_device_mesh("cpu", (4,)), [Shard(0)])
    own = fused[rank // 2 * 4 : rank // 2 * 4 + 4].clone()  # two expert ranks, each with a replica

    def convert(start: int, segment: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        halves = ((f"experts.{start + at}", row.chunk(2)) for at, row in enumerate(segment))
        return [(f"{n}.{k}_proj.weight", h) for n, pair in halves for k, h in zip(("gate", "up"), pair, strict=True)]

    def export() -> Iterator[tuple[str, torch.Tensor, ShardSpec]]:
        yield "dense.weight", rows.to_local().bfloat16().reshape(-1), ShardSpec.from_param(rows)
        spec = ShardSpec.from_param(cut)
        spec.hf_slots = [(f"stack.{row}.weight", (6, 5)) for row in range(4)]
        yield "stack", cut.to_local().bfloat16().reshape(-1), spec
        block = BlockPlacement((4, 6, 4), (rank // 2 * 4, 0, 0), (8, 6, 4))
        by_hand = ShardSpec((8, 6, 4), place=block, gather_group=dist.group.WORLD, to_hf_chunk=convert)
        yield "fused", own.bfloat16().reshape(-1), by_hand

    def expected() -> State:
        found = {"dense.weight": dense, **{f"stack.{row}.weight": each for row, each in enumerate(stack)}}
        return {name: tensor.bfloat16() for name, tensor in (found | dict(convert(0, fused))).items()}

    def change() -> None:
        for tensor in (stack, fused, dense, own, cut.to_local(), rows.to_local()):
            tensor.mul_(2)

    check_syncs(of_specs(export), expected, change)


@on_ranks(2, timeout=180)
def test_a_real_engine_of_verl(qwen2: str) -> None:
    """FSDP2's exports the same ``ShardSpec``."""
    engine: Any = trainer.build(qwen2, "fsdp2")
    source = of_specs(lambda: engine.get_per_tensor_param_shard()[0])

    def expected() -> State:
        return {name: tensor.bfloat16() for name, tensor in trainer.full_state(engine).items()}

    check_syncs(source, expected, lambda: trainer.perturb(engine, 1))


@on_ranks(2)
def test_what_is_no_box_of_one_whole_is_refused_by_name_on_all_ranks() -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    odd = DTensor.from_local(torch.ones(2, 3), mesh, [Partial()])
    strided = DTensor.from_local(torch.ones(4, 3), mesh, [_StridedShard(0, split_factor=2)])
    wrong = DTensor.from_local(torch.ones(2 + rank, 3), mesh, [Shard(0)], shape=torch.Size((4, 3)), stride=(3, 1))
    cut = distribute_tensor(torch.ones(4, 3), mesh, [Shard(1)])
    alone = ShardSpec((4, 3), place=BlockPlacement((2, 3), (0, 0), (4, 3)))
    over = ShardSpec((4, 3), place=BlockPlacement((2, 3), (rank, 0), (4, 3)))
    turning = mock.patch(f"{Given.__module__}.verl_rewrite", lambda kind: lambda pairs: ((n, t.T) for n, t in pairs))
    with turning:
        turned = open_source({"w": cut})
    placed: list[tuple[Any, str]] = [
        (open_source({"w": tensor, "placed": cut}), words)
        for tensor, words in (
            (odd, "parameter 'w' has placements (Partial(sum),): the ranks hold parts of a sum"),
            (strided, "a strided shard that is no box"),
            (wrong, "rank 1: ValueError: parameter 'w': this rank holds shape (3, 3), not (2, 3)"),
            (torch.ones(2 + rank), "on parameter 'w': rank 0: float32 of shape (2,); rank 1: float32 of shape (3,)"),
        )
    ]
    specs = [
        (of_specs(lambda spec=spec: [("w", torch.ones(6), spec)]), words)
        for spec, words in (
            (alone, "ranks 0, 1 hold 6 of 12 elements of parameter 'w'"),
            (over, "boxes that overlap at (1, 0) of parameter 'w'"),
            (ShardSpec((4, 3), place=6), "places a flat part at 6"),
        )
    ]
    for source, words in [*placed, (turned, "tensor 'w' is no contiguous part of 'w'"), *specs]:
        text = raised_alike(SyncError, source.agree_on_layout, Agreement(30.0))
        assert words in text, text
    nothing: list[tuple[Any, type[Exception], str]] = [
        (SimpleNamespace(engine_config=SimpleNamespace(strategy="torchtitan")), ValueError, "use one of fsdp"),
        ("weights", TypeError, "a str cannot be synced"),
        ({}, TypeError, "empty"),
        ({"w": 1}, TypeError, "something else than tensors"),
        (torch.nn.Linear(2, 2), ValueError, "has no config"),
    ]
    for given, error, words in nothing:
        with pytest.raises(error, match=words):
            open_source(given)
