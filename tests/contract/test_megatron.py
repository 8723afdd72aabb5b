# SPDX-License-Identifier: Apache-2.0
"""Megatron sources through verl's default bridge: what arrives is the checkpoint, and after training the bridge's own
export.

Real verl engines, megatron-core and Megatron-Bridge over gloo, the real sharding manager up to the plan, real staging
memory.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d
from worlds import run_world

from contract.fp8 import check_quantized, projections
from contract.reading import CPU, LARGE, TINY, State, check_same, deliver
from contract.sources import endpoint_of
from megatron_cpu.engines import Layout, build, stock_export, train_step, unwrapped
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.sharding_manager import get_sharding_manager
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.sync.sender import STAGING_BUCKETS
from verl_sync_plugin.trainers.base import take_over

pytestmark = pytest.mark.usefixtures("bridge_processes")


SYNCS = 3


def manager_of(
    engine: Any, bucket_bytes: int, wire: str = "bfloat16", delivery: str = "auto", server: Any = None
) -> ShardingManager:
    """Every rank calls the server, if there is one."""
    config, endpoint = SyncConfig(timeout_seconds=20, delivery=delivery), endpoint_of(server, server is not None)
    return get_sharding_manager("megatron", "sglang")(engine, endpoint, config, bucket_bytes, CPU, wire)


def one_sync(manager: ShardingManager) -> State:
    """Everything that arrives; the trainer is not written to."""
    before = [p._version for chunk in manager.trainer.engine.module for p in chunk.parameters()]
    sync, _ = manager.plan()

    def prepare(index: int, work: Any) -> None:
        manager.agreement.run(f"packing bucket {index}", work)
        manager.agreement.settle(f"packing bucket {index}")

    got = deliver(sync.source, sync.plan, sync.shards, manager.sender, prepare)
    assert manager.sender.export().nbytes <= STAGING_BUCKETS * manager._bucket_bytes
    sync.source.release()
    assert before == [p._version for chunk in manager.trainer.engine.module for p in chunk.parameters()]
    return got


def synced(
    manager: ShardingManager, kind: str = "MegatronSource", check: Callable[[State, State], None] = check_same
) -> State:
    """A sync brings what the bridge itself exports, which is returned, read by a source of this kind."""
    expected = stock_export(manager.trainer.engine)
    check(one_sync(manager), expected)
    assert type(manager.source).__name__ == kind
    return expected


def trained_steps(engine: Any) -> Iterator[int]:
    """The numbers of syncs, between which the engine is trained."""
    for step in range(SYNCS):
        if step:
            train_step(engine)
        yield step


def error_of(work: Callable[[], object]) -> tuple[str, float]:
    """The text of a sync that must fail, and the seconds until then."""
    started = time.monotonic()
    with pytest.raises(SyncError) as caught:
        work()
    return str(caught.value), time.monotonic() - started


def on_disk(folder: str) -> State:
    found: State = {}
    for file in Path(folder).glob("*.safetensors"):
        found.update(load_file(file))
    return found


def on_the_wire(state: State, wire: torch.dtype) -> State:
    """Returns what must arrive as long as no engine has said in which dtypes it keeps them: no tensor is wider than in
    the trainer, and the router's bias, a buffer, stays as it is."""
    return {
        name: tensor.to(wire) if wire.itemsize < tensor.itemsize and not is_router_bias(name) else tensor
        for name, tensor in state.items()
    }


def is_router_bias(name: str) -> bool:
    return name.endswith("_bias") and "gate" in name


def syncs(model_path: str, layout: Layout, wire: str = "bfloat16") -> list[str]:
    """Three syncs with two bucket sizes each and a training step in between; returns the plans' digests."""
    engine = build(model_path, layout)
    managers = [
        manager_of(engine, size, wire, how) for size, how in ((TINY, "staged"), (LARGE, "auto"), (TINY, "auto"))
    ]
    disk, digests = on_disk(model_path), []
    # The checkpoint is all in bfloat16; the router's biases become float32
    expected = {n: t.float() if is_router_bias(n) else t for n, t in disk.items()}
    for step in trained_steps(engine):
        if step:
            last, expected = expected, stock_export(engine)
            same = [name for name, tensor in expected.items() if torch.equal(tensor, last[name])]
            assert not same, f"training must have changed everything: {same}"
        for manager in managers:
            check_same(one_sync(manager), on_the_wire(expected, getattr(torch, wire)))
            assert type(manager.source).__name__ == "MegatronSource"
            digests.append(manager.planned.digest if manager.planned else "")
    return digests


CASES = [
    ("qwen2", Layout(4, tp=2, pp=2)),
    ("qwen2-tied", Layout(2, pp=2)),  # with virtual stages the bridge itself cannot load a tied model
    ("qwen3-moe", Layout(4, tp=2, pp=2, ep=2, etp=1)),
    ("moonlight", Layout(2, tp=2, ep=2, etp=1)),
    ("deepseek", Layout(2, tp=2)),
]
MORE_CASES = [
    ("qwen2", Layout(1)),
    ("qwen2", Layout(2)),
    ("qwen2", Layout(4, tp=2)),
    ("qwen2", Layout(2, tp=2)),
    ("qwen2", Layout(2, cp=2)),
    ("qwen2", Layout(2, pp=2, vpp=2)),
    ("qwen2-tied", Layout(2, tp=2)),
    ("qwen2-tied", Layout(4, tp=2, pp=2)),
    ("qwen3", Layout(2, tp=2)),
    ("qwen3", Layout(2, pp=2)),
    ("qwen3-moe", Layout(2, ep=2)),
    ("qwen3-moe", Layout(2, tp=2, ep=1, etp=2)),
    ("qwen3-moe", Layout(4, tp=2, ep=2, etp=2)),
    ("moonlight", Layout(4, ep=2, pp=2, vpp=2)),
]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.extended) for case in MORE_CASES)],
    ids=lambda value: str(value),
)
def test_every_tensor_arrives_bit_for_bit(kind: str, layout: Layout, checkpoint: Callable[[str], str]) -> None:
    digests = run_world(layout.size, syncs, checkpoint(kind), layout, timeout=180)
    assert digests[0] == digests[0][: len(digests[0]) // SYNCS] * SYNCS, (
        "the plan must not change while the layout does not"
    )


def test_routers_keep_their_dtype_on_a_float32_wire(checkpoint: Callable[[str], str]) -> None:
    run_world(2, syncs, checkpoint("moonlight"), Layout(2, tp=2, ep=2, etp=1), "float32", timeout=120)


def syncs_offloaded(engine: Any, check: Callable[[State, State], None]) -> None:
    """Parameters are in host memory while they are sent, and are not brought to the device for it."""
    from verl.utils.megatron_utils import load_megatron_model_to_gpu, offload_megatron_model_to_cpu

    def on_the_device() -> int:
        return sum(b.param_data.untyped_storage().size() for chunk in engine.module for b in chunk.buffers)

    manager = manager_of(engine, LARGE)
    for _ in trained_steps(engine):
        expected, held = stock_export(engine), on_the_device()
        offload_megatron_model_to_cpu(engine.module)
        got = one_sync(manager)
        assert held > on_the_device() == 0, "the sync loaded the parameters"
        check(got, expected)
        load_megatron_model_to_gpu(engine.module)


def offloaded(model_path: str, layout: Layout) -> None:
    syncs_offloaded(build(model_path, layout), check_same)


@pytest.mark.parametrize("layout", [Layout(2, tp=2), Layout(2, pp=2)], ids=str)
def test_offloaded_parameters_are_read_where_they_are(layout: Layout, checkpoint: Callable[[str], str]) -> None:
    run_world(layout.size, offloaded, checkpoint("qwen2"), layout, timeout=120)


def padded(model_path: str, layout: Layout) -> int:
    """Megatron pads the vocabulary, and what arrives is the checkpoint; returns the rows it has padded."""
    engine = build(model_path, layout, should_pad_vocab=True, make_vocab_size_divisible_by=128)
    disk = on_disk(model_path)
    for size in (TINY, LARGE):
        check_same(one_sync(manager_of(engine, size)), disk)
    rows = unwrapped(engine.module[0]).embedding.word_embeddings.weight.shape[0] * layout.tp
    return int(rows) - len(disk["model.embed_tokens.weight"])


def test_a_padded_vocabulary_arrives_without_its_padding(checkpoint: Callable[[str], str]) -> None:
    assert run_world(2, padded, checkpoint("qwen2"), Layout(2, tp=2), timeout=120) == [192, 192]


def refused(model_path: str) -> list[str]:
    """The errors of an engine set up in ways that cannot be synced; then it is set up well and synced."""
    engine = build(model_path, Layout(dist.get_world_size(), tp=2))
    broken = [
        mock.patch.object(engine.module[0].ddp_config, "overlap_param_gather", True),
        mock.patch.object(engine, "engine_config", replace(engine.engine_config, use_megatron_fsdp=True)),
        mock.patch.object(engine, "_qat_enabled", True),
        mock.patch.object(engine, "vanilla_bridge", True),
    ]
    manager, texts = manager_of(engine, LARGE), []
    for context in broken:
        with context:
            texts.append(error_of(lambda: one_sync(manager))[0])
    check_same(one_sync(manager), on_disk(model_path))
    return texts


def test_what_cannot_be_synced_is_refused_by_name(checkpoint: Callable[[str], str]) -> None:
    first, second = run_world(2, refused, checkpoint("qwen2"), timeout=120)
    assert first == second, "the same error on every rank"
    for text, key in zip(
        first,
        (
            "override_ddp_config.overlap_param_gather=True",
            "actor.megatron.use_megatron_fsdp=True",
            "actor.megatron.qat.enable=True",
            "actor.megatron.vanilla_mbridge=True",
        ),
        strict=True,
    ):
        assert key in text, text


DISAGREEING = {
    "shape": "rank 0: bfloat16 (64, 32), part 1 of 2 along dimension 1; rank 1: bfloat16 (65, 32), part 2 of 2",
    "dtype": "rank 0: bfloat16 (64, 32), part 1 of 2 along dimension 1; rank 1: float32 (64, 32), part 2 of 2",
    "gone": "ranks 0, 1 hold 2048 of 4096 elements of parameter",
}


def disagreeing(model_path: str, layout: Layout, changes: Sequence[str]) -> list[tuple[str, float]]:
    """The last rank holds a parameter differently in one sync and as before in the next: (error, seconds) of each
    change."""
    engine, found = build(model_path, layout), []
    manager = manager_of(engine, LARGE)
    one_sync(manager)
    module = unwrapped(engine.module[0]).decoder.layers[0].self_attention.linear_proj
    honest = module.weight
    for change in changes:
        if _is_last():
            module._parameters.pop("weight")
            if change != "gone":
                shape = (honest.shape[0] + 1, *honest.shape[1:]) if change == "shape" else honest.shape
                dtype = torch.float32 if change == "dtype" else honest.dtype
                module.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
                for name in ("tensor_model_parallel", "partition_dim"):
                    setattr(module.weight, name, getattr(honest, name))
        found.append(error_of(lambda: one_sync(manager)))
        module.weight = honest
        train_step(engine)
        synced(manager)
    return found


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def test_disagreement_is_one_error_soon_and_recovered_from(checkpoint: Callable[[str], str]) -> None:
    given = checkpoint("qwen2"), Layout(2, tp=2), tuple(DISAGREEING)
    results = run_world(2, disagreeing, *given, timeout=120)
    for said, (text, seconds), (same, others) in zip(DISAGREEING.values(), *results, strict=True):
        assert text == same and max(seconds, others) < 5
        assert "failed at 'matching the layouts of all ranks'; trainer weights are unchanged" in text
        assert "decoder.layers.0.self_attention.linear_proj.weight" in text and said in text


# Where a model goes through Megatron-Bridge's own stream


def norms_are_computed() -> Any:
    """A bridge whose norms are centered at zero in Megatron, as Gemma's are: their conversion adds one."""
    from megatron.bridge.models.conversion.param_mapping import ReplicatedMapping

    stock = ReplicatedMapping.megatron_to_hf

    def plus_one(self: Any, weights: torch.Tensor | None, module: Any) -> dict[str, torch.Tensor]:
        return {name: tensor + 1 for name, tensor in stock(self, weights, module).items()}

    return mock.patch.object(ReplicatedMapping, "megatron_to_hf", plus_one)


def computed_in_the_stream(model_path: str, layout: Layout) -> None:
    """A model whose conversion computes: bit for bit the bridge's export, three times, with two bucket sizes."""
    engine = build(model_path, layout)
    take_over(True)  # as verl's worker does: the engine hands out its stream unconsumed
    with norms_are_computed():
        for size in (TINY, LARGE):
            manager, keys = manager_of(engine, size), []
            for _ in trained_steps(engine):
                synced(manager, "StreamSource")
                dist.barrier()
                store = distributed_c10d._get_default_store()
                keys.append(sorted(key for key in store.list_keys() if "verl_sync_plugin" in key))
            assert len(keys[1]) == len(keys[2]) < 10 + len(keys[0]), f"meetings leave keys in the store: {keys[2]}"


@pytest.mark.parametrize(("kind", "layout"), [("qwen2-tied", Layout(2, pp=2)), ("qwen3-moe", Layout(2, ep=2))], ids=str)
def test_a_model_whose_conversion_computes_goes_through_the_bridges_stream(
    kind: str, layout: Layout, checkpoint: Callable[[str], str]
) -> None:
    run_world(layout.size, computed_in_the_stream, checkpoint(kind), layout, timeout=120)


def _failing_at(number: int) -> Any:
    """Makes one call of the bridge's row-parallel mappings raise on the last rank."""
    from megatron.bridge.models.conversion.param_mapping import RowParallelMapping

    stock, calls = RowParallelMapping.megatron_to_hf, itertools.count(1)

    def convert(self: Any, weights: torch.Tensor | None, module: Any) -> dict[str, torch.Tensor]:
        if _is_last() and next(calls) == number:
            raise RuntimeError("injected into the conversion")
        return stock(self, weights, module)

    return mock.patch.object(RowParallelMapping, "megatron_to_hf", convert)


def failing_in_the_stream(model_path: str, layout: Layout) -> list[tuple[str, float]]:
    """The last rank fails inside the stream: everyone's error, its seconds; then all is well.

    In the second sync, early, with torn tensors and with one bucket; and in a first sync, at the last of the
    conversions in which it can, when others may have come to the end of what is learnt.
    """
    engine, found = build(model_path, layout), []
    take_over(True)
    last = 2 * engine.model_config.hf_config.num_hidden_layers  # two row-parallel weights in each layer
    for bucket_bytes, learning in ((TINY, False), (LARGE, False), (LARGE, True)):
        manager = manager_of(engine, bucket_bytes)
        with norms_are_computed():
            if not learning:
                synced(manager, "StreamSource")
                train_step(engine)
            with _failing_at(last if learning else 3):
                found.append(error_of(partial(one_sync, manager)))
            for _ in trained_steps(engine):
                synced(manager, "StreamSource")
    return found


@pytest.mark.parametrize("layout", [Layout(2, tp=2), Layout(2, pp=2)], ids=str)
def test_a_rank_that_fails_inside_the_stream_is_everybodys_error_and_recovered_from(
    layout: Layout, checkpoint: Callable[[str], str]
) -> None:
    first, second = run_world(2, failing_in_the_stream, checkpoint("qwen2"), layout, timeout=180)
    for text, seconds in (*first, *second):
        assert "injected into the conversion" in text and "rank 1" in text, text
        assert seconds < 10, "others waited for a rank that had failed"


def in_fp8(model_path: str, layout: Layout, computed: bool) -> None:
    """Parts that the ranks hold, or whole tensors of the bridge's stream, are quantized as whole tensors are, and again
    after a training step."""
    engine = build(model_path, layout)
    take_over(True)
    with norms_are_computed() if computed else nullcontext():
        for size, sharded in ((TINY, False), (LARGE, True)):
            manager = manager_of(engine, size)
            manager.plan()
            source, expected = manager.source, on_the_wire(stock_export(engine), torch.bfloat16)
            assert source is not None and type(source).__name__ == ("StreamSource" if computed else "MegatronSource")
            check_quantized(source, expected, projections(expected, (16, 8)), size, sharded)
            train_step(engine)


@pytest.mark.parametrize(
    ("kind", "layout", "computed"),
    [
        ("qwen2", Layout(4, tp=2, pp=2), False),
        ("qwen3-moe", Layout(2, tp=2, ep=2, etp=1), False),
        ("qwen3-moe", Layout(2, ep=2), True),
    ],
    ids=str,
)
def test_parts_are_quantized_as_the_whole_tensor_is(
    kind: str, layout: Layout, computed: bool, checkpoint: Callable[[str], str]
) -> None:
    """Where the bridge's conversion computes, the ranks have whole tensors of its stream, one after the other."""
    run_world(layout.size, in_fp8, checkpoint(kind), layout, computed, timeout=180)


# Tensors change places between syncs


def rearranged(model_path: str, layout: Layout) -> None:
    """Tensors get other memory, are replaced, and are replaced with the module around them; as long as nothing of that
    happens, the model is not walked again."""
    engine = build(model_path, layout)
    manager = manager_of(engine, LARGE)
    synced(manager)
    with mock.patch("verl_sync_plugin.trainers.megatron.model.held_by", side_effect=AssertionError("walked again")):
        train_step(engine)
        synced(manager)
    layers = unwrapped(engine.module[0]).decoder.layers
    for _ in range(2):
        moved = layers[0].self_attention.linear_proj.weight
        moved.data = moved.data + 1
        synced(manager)
        replaced = layers[0].self_attention.linear_qkv
        replaced.weight = _more(replaced.weight)
        synced(manager)
        module = copy.copy(layers[0].mlp.linear_fc2)
        module.__dict__["_parameters"] = {"weight": _more(module.weight)}
        layers[0].mlp.linear_fc2 = module
        synced(manager)
        wrapper = engine.module[0]
        while not hasattr(wrapper.module, "decoder"):
            wrapper = wrapper.module
        wrapper.module = _copied(wrapper.module)
        layers = unwrapped(engine.module[0]).decoder.layers
        synced(manager)


def _copied(module: torch.nn.Module) -> torch.nn.Module:
    """The same model in other memory with other weights; process groups and configurations are shared."""
    values = [value for part in module.modules() for value in vars(part).values()]
    shared = {id(value): value for value in values if not isinstance(value, dict | torch.nn.Module)}
    other = copy.deepcopy(module, shared)
    for before, parameter in zip(module.parameters(), other.parameters(), strict=True):
        parameter.__dict__.update(before.__dict__)
        parameter.data += 1
    return other


def _more(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    other = torch.nn.Parameter(parameter.detach() + 1)
    other.__dict__.update(parameter.__dict__)
    return other


def test_tensors_and_modules_that_are_replaced_are_found(checkpoint: Callable[[str], str]) -> None:
    run_world(2, rearranged, checkpoint("qwen2"), Layout(2, tp=2), timeout=120)


# Megatron's own layers under the names of TransformerEngine's: classes, and norms fused into the linear layer after
# them. What these layers compute is not there; what a bridge reads of them is

# Of a layer: where a norm lies in Megatron's own layers, and the linear layer that TransformerEngine fuses it into
FUSED = {
    "input_layernorm": "self_attention.linear_qkv",
    "pre_mlp_layernorm": "mlp.linear_fc1",
    "self_attention.q_layernorm": "self_attention.linear_q_up_proj",
    "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
}
CLASSES = {
    "ColumnParallelLinear": "TEColumnParallelLinear",
    "RowParallelLinear": "TERowParallelLinear",
    "ColumnParallelGroupedLinear": "TEColumnParallelGroupedLinear",
    "RowParallelGroupedLinear": "TERowParallelGroupedLinear",
    "WrappedTorchNorm": "TENorm",
}


def _find(module: torch.nn.Module, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)  # type: ignore[assignment]
    return module


def _rename(module: Any, name: str) -> None:
    module.__class__ = type(name, (type(module),), {})


def as_transformer_engine(engine: Any) -> set[str]:
    """Renames in place; returns the names of all parameters."""
    names: set[str] = set()
    for chunk in map(unwrapped, engine.module):
        for layer in chunk.decoder.layers:
            for norm_path, linear_path in FUSED.items():
                norm, linear = _find(layer, norm_path), _find(layer, linear_path)
                if linear is None or getattr(norm, "weight", None) is None:
                    continue
                linear.register_parameter("layer_norm_weight", norm._parameters.pop("weight"))
                _rename(linear, "TELayerNormColumnParallelLinear")
            for module in list(layer.modules()):
                if type(module).__name__ in CLASSES:
                    _rename(module, CLASSES[type(module).__name__])
        names |= {name for name, _ in chunk.named_parameters()}
    return names


def syncs_as_transformer_engine(model_path: str, layout: Layout) -> set[str]:
    """Bit for bit the checkpoint, which is what the bridge exports; returns the names."""
    engine = build(model_path, layout)
    names = as_transformer_engine(engine)
    disk = on_disk(model_path)
    check_same({n: t.to(disk[n].dtype) for n, t in stock_export(engine).items()}, disk)
    for size in (TINY, LARGE):
        manager = manager_of(engine, size)
        got = one_sync(manager)
        assert type(manager.source).__name__ == "MegatronSource"
        check_same({n: t.to(disk[n].dtype) for n, t in got.items()}, disk)
    return names


@pytest.mark.parametrize(
    ("kind", "layout", "fused"),
    [
        ("qwen3-moe", Layout(2, tp=2, ep=2, etp=1), ["self_attention.linear_qkv.layer_norm_weight"]),
        (
            "deepseek",
            Layout(2, tp=2),
            [
                *("mlp.linear_fc1.layer_norm_weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
                "self_attention.linear_kv_up_proj.layer_norm_weight",
            ],
        ),
    ],
    ids=str,
)
def test_names_and_classes_of_transformer_engine_are_read(
    kind: str, layout: Layout, fused: list[str], checkpoint: Callable[[str], str]
) -> None:
    names, _ = run_world(2, syncs_as_transformer_engine, checkpoint(kind), layout, timeout=120)
    assert {f"decoder.layers.0.{name}" for name in fused} <= names
