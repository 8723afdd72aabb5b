# SPDX-License-Identifier: Apache-2.0
"""Covers Megatron sources through verl's default bridge; verl's engines, megatron-core and staging memory are real."""

import itertools
import time
from collections.abc import Callable
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
from worlds import on_ranks

from contract.reading import LARGE, TINY, Reader, State, check_quantized, check_same, check_syncs, projections
from contract.sources import StandIn, manager_of, open_source, raised_alike
from megatron_cpu.engines import Layout, build, stock_export, train_step, unwrapped
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.trainers.base import export_shards
from verl_sync_plugin.trainers.megatron.bridge import CopyTrace, NotACopyError

pytestmark = pytest.mark.usefixtures("bridge_processes")

Compare = Callable[[State, State], None]


def reader_of(engine: Any, wire: str = "bfloat16") -> Reader:
    return Reader(open_source("megatron", engine, wire=wire))


def synced(engine: Any, reader: Reader, kind: str = "MegatronSource", same: Compare = check_same) -> None:
    """Checks that one sync brings the bridge's own export, read by a source of this kind."""
    expected = stock_export(engine)
    same(reader.sync(LARGE), expected)
    assert type(reader.source).__name__ == kind


def check_exports(engine: Any, kind: str = "MegatronSource", same: Compare = check_same) -> None:
    """Checks that every sync of many, in every way and with training in between, does."""
    reader = reader_of(engine)
    check_syncs(reader, lambda: stock_export(engine), lambda: train_step(engine), engine.module, same)
    assert type(reader.source).__name__ == kind


def error_of(work: Callable[[], object], seconds: float = 10.0) -> str:
    """The text of a sync that must fail, soon and alike on every rank."""
    started = time.monotonic()
    text = raised_alike((SyncError, ValueError), work)
    assert time.monotonic() - started < seconds, "a rank waited for one that had failed"
    return text


def on_disk(folder: str) -> State:
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def is_router_bias(name: str) -> bool:
    return name.endswith("_bias") and "gate" in name


def on_the_wire(state: State, wire: torch.dtype) -> State:
    """Returns what arrives before engines name dtypes: nothing wider than in the trainer, and router biases as is."""
    return {
        name: tensor.to(wire) if wire.itemsize < tensor.itemsize and not is_router_bias(name) else tensor
        for name, tensor in state.items()
    }


CASES = [
    ("qwen2", Layout(4, tp=2, pp=2), "bfloat16"),
    ("qwen2-tied", Layout(2, pp=2), "bfloat16"),  # with virtual stages the bridge itself cannot load a tied model
    ("qwen3-moe", Layout(4, tp=2, pp=2, ep=2, etp=1), "bfloat16"),
    ("moonlight", Layout(2, tp=2, ep=2, etp=1), "bfloat16"),
    ("moonlight", Layout(2, tp=2, ep=2, etp=1), "float32"),
    ("deepseek", Layout(2, tp=2), "bfloat16"),
]
MORE_CASES = {
    "qwen2": [Layout(1), Layout(2), Layout(4, tp=2), Layout(2, tp=2), Layout(2, cp=2), Layout(2, pp=2, vpp=2)],
    "qwen2-tied": [Layout(2, tp=2), Layout(4, tp=2, pp=2)],
    "qwen3": [Layout(2, tp=2), Layout(2, pp=2)],
    "qwen3-moe": [Layout(2, ep=2), Layout(2, tp=2, ep=1, etp=2), Layout(4, tp=2, ep=2, etp=2)],
    "moonlight": [Layout(4, ep=2, pp=2, vpp=2)],
}


@pytest.mark.parametrize(("kind", "layout", "wire"), [
    *CASES,
    *(
        pytest.param(kind, layout, "bfloat16", marks=pytest.mark.extended)
        for kind, layouts in MORE_CASES.items()
        for layout in layouts
    ),
], ids=str)  # fmt: skip
@on_ranks("layout", timeout=180)
def test_every_tensor_arrives_bit_for_bit(checkpoint: str, layout: Layout, wire: str) -> None:
    """First the checkpoint, all in bfloat16 but for the router's biases, which become float32."""
    engine, state = build(checkpoint, layout), on_disk(checkpoint)
    state = {name: tensor.float() if is_router_bias(name) else tensor for name, tensor in state.items()}

    def train() -> None:
        train_step(engine)
        trained = stock_export(engine)
        same = [name for name, tensor in trained.items() if torch.equal(tensor, state[name])]
        assert not same, f"training must have changed everything: {same}"
        state.update(trained)

    reader = reader_of(engine, wire)
    check_syncs(reader, lambda: on_the_wire(state, getattr(torch, wire)), train, engine.module)
    assert type(reader.source).__name__ == "MegatronSource"


def check_offloaded(engine: Any, same: Compare = check_same) -> None:
    """Parameters are in host memory while they are sent, and are not brought to the device for it."""
    from verl.utils.megatron_utils import load_megatron_model_to_gpu, offload_megatron_model_to_cpu

    def on_the_device() -> int:
        return sum(b.param_data.untyped_storage().size() for chunk in engine.module for b in chunk.buffers)

    reader = reader_of(engine)
    for _ in range(3):
        expected, held = stock_export(engine), on_the_device()
        offload_megatron_model_to_cpu(engine.module)
        got = reader.sync(LARGE)
        assert held > on_the_device() == 0, "the sync loaded the parameters"
        same(got, expected)
        load_megatron_model_to_gpu(engine.module)
        train_step(engine)


@pytest.mark.parametrize("layout", [Layout(2, tp=2), Layout(2, pp=2)], ids=str)
@on_ranks("layout")
def test_offloaded_parameters_are_read_where_they_are(checkpoint: str, layout: Layout) -> None:
    check_offloaded(build(checkpoint, layout))


@on_ranks(2)
def test_a_padded_vocabulary_arrives_without_its_padding(checkpoint: str, layout: Layout) -> None:
    engine = build(checkpoint, layout, should_pad_vocab=True, make_vocab_size_divisible_by=128)
    disk = on_disk(checkpoint)
    check_same(reader_of(engine).sync(), disk)
    rows = unwrapped(engine.module[0]).embedding.word_embeddings.weight.shape[0] * layout.tp
    assert rows - len(disk["model.embed_tokens.weight"]) == 192, "Megatron has padded nothing"


@on_ranks(2)
def test_what_cannot_be_synced_is_refused_by_name(checkpoint: str, layout: Layout) -> None:
    """By the same error on every rank; set up well, the same engine is synced."""
    engine = build(checkpoint, layout)
    fsdp = replace(engine.engine_config, use_megatron_fsdp=True)
    for owner, name, value, key in (
        (engine.module[0].ddp_config, "overlap_param_gather", True, "override_ddp_config.overlap_param_gather=True"),
        (engine, "engine_config", fsdp, "actor.megatron.use_megatron_fsdp=True"),
        (engine, "_qat_enabled", True, "actor.megatron.qat.enable=True"),
        (engine, "vanilla_bridge", True, "actor.megatron.vanilla_mbridge=True"),
    ):
        with mock.patch.object(owner, name, value):
            assert key in error_of(lambda: reader_of(engine).sync())
    check_same(reader_of(engine).sync(), on_disk(checkpoint))


def test_a_large_weight_that_is_transposed_is_no_plain_copy() -> None:
    """Of one that is cut into columns every run is planned."""
    for side in (1024, 256):
        trace = CopyTrace((side, side), torch.bfloat16, 1)
        with pytest.raises(NotACopyError) if side == 1024 else nullcontext(), trace:
            trace.shares(trace.inputs[0].t().contiguous())
    with (trace := CopyTrace((70_000, 32), torch.bfloat16, 2)):
        whole = torch.cat(trace.inputs, dim=1)
    assert [run.count for runs in trace.shares(whole) for run in runs] == [70_000] * 2


def converting(mapping: str, change: Callable[[Callable[[], State]], State]) -> Any:
    """A bridge in which a kind of mapping converts otherwise."""
    from megatron.bridge.models.conversion import param_mapping

    owner: Any = getattr(param_mapping, mapping)
    stock = owner.megatron_to_hf
    return mock.patch.object(owner, "megatron_to_hf", lambda *given: change(lambda: stock(*given)))


def norms_are_computed() -> Any:
    """As Qwen3-Next's are, which are centered at zero in Megatron."""
    return converting("ReplicatedMapping", lambda stock: {name: tensor + 1 for name, tensor in stock().items()})


@pytest.mark.parametrize(("kind", "layout"), [("qwen2-tied", Layout(2, pp=2)), ("qwen3-moe", Layout(2, ep=2))], ids=str)
@on_ranks("layout")
def test_a_model_whose_conversion_computes_goes_through_the_bridges_stream(checkpoint: str, layout: Layout) -> None:
    engine = build(checkpoint, layout)
    export_shards(True)  # as verl's worker does: the engine hands out its stream unconsumed
    with norms_are_computed():
        check_exports(engine, "StreamSource")
        reader, keys = reader_of(engine), []
        for _ in range(3):
            synced(engine, reader, "StreamSource")
            dist.barrier()
            store = distributed_c10d._get_default_store()
            keys.append(sorted(key for key in store.list_keys() if "verl_sync_plugin" in key))
        assert len(keys[1]) == len(keys[2]) < 10 + len(keys[0]), f"meetings leave keys in the store: {keys[2]}"
        twice_in_the_stream(engine)


def twice_in_the_stream(engine: Any) -> None:
    """Neither a tensor that comes once more at the end, nor the bridge's copy of a tied one, is learnt again."""
    stock, opened, tied = engine.get_per_tensor_param, 0, engine.model_config.hf_config.tie_word_embeddings
    reader = reader_of(engine)

    def export(*given: Any, **more: Any) -> Any:
        nonlocal opened
        opened += 1
        named = [(name, tensor.clone()) for name, tensor, *_ in stock(*given, **more)[0]]
        name, first = named[0]
        return iter([*named, *([("lm_head.weight", first.clone())] * tied), (name, first.clone())]), None

    with mock.patch.object(engine, "get_per_tensor_param", export):
        for _ in range(3):
            synced(engine, reader, "StreamSource")
    assert opened == 1 + 3, "learnt once"


def failing_at(number: int) -> Any:
    """Makes one call of the bridge's row-parallel mappings raise on the last rank."""
    last, calls = dist.get_rank() == dist.get_world_size() - 1, itertools.count(1)

    def convert(stock: Callable[[], State]) -> State:
        if last and next(calls) == number:
            raise RuntimeError("injected into the conversion")
        return stock()

    return converting("RowParallelMapping", convert)


@pytest.mark.parametrize("layout", [Layout(2, tp=2), Layout(2, pp=2)], ids=str)
@on_ranks("layout", timeout=180)
def test_a_rank_that_fails_inside_the_stream_is_everybodys_error_and_passes(checkpoint: str, layout: Layout) -> None:
    """Fails early, with torn tensors and one bucket, and in a first sync at the last conversion in which it can."""
    engine = build(checkpoint, layout)
    export_shards(True)
    last = 2 * engine.model_config.hf_config.num_hidden_layers  # two row-parallel weights in each layer
    for bucket_bytes, learning in ((TINY, False), (LARGE, False), (LARGE, True)):
        reader = reader_of(engine)
        with norms_are_computed():
            if not learning:
                synced(engine, reader, "StreamSource")
            train_step(engine)
            with failing_at(last if learning else 3):
                text = error_of(partial(reader.sync, bucket_bytes))
            assert "injected into the conversion" in text and "rank 1" in text, text
            for _ in range(2):
                synced(engine, reader, "StreamSource")
                train_step(engine)


@pytest.mark.parametrize(("kind", "layout", "computed"), [
    ("qwen2", Layout(4, tp=2, pp=2), False),
    ("qwen3-moe", Layout(2, tp=2, ep=2, etp=1), False),
    ("qwen3-moe", Layout(2, ep=2), True),
], ids=str)  # fmt: skip
@on_ranks("layout", timeout=180)
def test_parts_are_quantized_as_the_whole_tensor_is(checkpoint: str, layout: Layout, computed: bool) -> None:
    """Where the bridge's conversion computes, the ranks have whole tensors of its stream, one after the other."""
    engine = build(checkpoint, layout)
    export_shards(True)
    with norms_are_computed() if computed else nullcontext():
        for size, sharded in ((TINY, False), (LARGE, True)):
            manager = manager_of("megatron", engine, StandIn())
            expected = on_the_wire(stock_export(engine), torch.bfloat16)
            reader = check_quantized(manager, expected, projections(expected, (16, 8)), size, sharded)
            assert type(reader.source._inner).__name__ == ("StreamSource" if computed else "MegatronSource")
            train_step(engine)


@on_ranks(2)
def test_tensors_that_move_or_are_replaced_are_found(checkpoint: str, layout: Layout) -> None:
    """And the model is not walked again."""
    engine = build(checkpoint, layout)
    reader = reader_of(engine)
    synced(engine, reader)
    with mock.patch("verl_sync_plugin.trainers.megatron.model.held_by", side_effect=AssertionError("walked again")):
        train_step(engine)
        synced(engine, reader)
        for _ in range(2):
            layer = unwrapped(engine.module[0]).decoder.layers[0].self_attention
            layer.linear_proj.weight.data = layer.linear_proj.weight.data + 1
            synced(engine, reader)
            before = layer.linear_qkv.weight
            layer.linear_qkv.weight = torch.nn.Parameter(before.data + 1)
            layer.linear_qkv.weight.__dict__.update(before.__dict__)
            synced(engine, reader)


# Megatron's own layers under the names of TransformerEngine's: classes, and norms fused into the linear layer after
# them. What these layers compute is not there; what a bridge reads of them is
# Of a layer: where a norm lies in Megatron's own layers, and the linear layer that TransformerEngine fuses it into
FUSED = {
    "input_layernorm": "self_attention.linear_qkv",
    "pre_mlp_layernorm": "mlp.linear_fc1",
    "self_attention.q_layernorm": "self_attention.linear_q_up_proj",
    "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
}


def as_transformer_engine(engine: Any) -> None:
    for layer in (layer for chunk in engine.module for layer in unwrapped(chunk).decoder.layers):
        modules: dict[str, Any] = dict(layer.named_modules())
        fused = {linear: modules[norm] for norm, linear in FUSED.items() if norm in modules and linear in modules}
        for name, module in modules.items():
            stock = type(module).__name__
            called = "TENorm" if stock == "WrappedTorchNorm" else f"TE{stock}" if stock.endswith("Linear") else stock
            if (norm := fused.get(name)) is not None and norm.weight is not None:
                module.register_parameter("layer_norm_weight", norm._parameters.pop("weight"))
                called = "TELayerNormColumnParallelLinear"
            module.__class__ = type(called, (type(module),), {})


@pytest.mark.parametrize(("kind", "layout", "fused"), [
    ("qwen3-moe", Layout(2, tp=2, ep=2, etp=1), ["self_attention.linear_qkv"]),
    (
        "deepseek",
        Layout(2, tp=2),
        ["mlp.linear_fc1", "self_attention.linear_q_up_proj", "self_attention.linear_kv_up_proj"],
    ),
], ids=str)  # fmt: skip
@on_ranks("layout")
def test_names_and_classes_of_transformer_engine_are_read(checkpoint: str, layout: Layout, fused: list[str]) -> None:
    """Bit for bit the checkpoint, which is what the bridge exports."""
    engine = build(checkpoint, layout)
    as_transformer_engine(engine)
    parameters = {name for chunk in engine.module for name, _ in unwrapped(chunk).named_parameters()}
    assert {f"decoder.layers.0.{name}.layer_norm_weight" for name in fused} <= parameters
    disk = on_disk(checkpoint)
    check_same({n: t.to(disk[n].dtype) for n, t in stock_export(engine).items()}, disk)
    reader = reader_of(engine)
    check_same({n: t.to(disk[n].dtype) for n, t in reader.sync().items()}, disk)
    assert type(reader.source).__name__ == "MegatronSource"
