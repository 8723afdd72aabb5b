# SPDX-License-Identifier: Apache-2.0
"""Adapters: merging any consecutive part of a weight equals the same part of PEFT's own merge, for shapes and ranks at
random; and what an engine that serves an adapter would leave out is refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftType, TaskType, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from contract.fsdp_models import ModelConfig, merging_source
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.tensors import Shard
from verl_sync_plugin.lora.peft import Adapters
from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.sharding_manager import get_sharding_manager

Sizes = tuple[int, int]


class Experts(torch.nn.Module):
    """Fused expert weights, (experts, out, in) or (experts, in, out)."""

    def __init__(self, count: int, sizes: Sizes, transposed: bool) -> None:
        super().__init__()
        self.is_transposed = transposed
        self.stack = torch.nn.Parameter(torch.randn(count, *sizes))


LAYERS: dict[str, Callable[[Sizes, int], torch.nn.Module]] = {
    "linear": lambda sizes, k: torch.nn.Linear(*sizes),
    "conv1d-of-gpt2": lambda sizes, k: Conv1D(*sizes),
    "embedding": lambda sizes, k: torch.nn.Embedding(*sizes),
    "conv1d": lambda sizes, k: torch.nn.Conv1d(*sizes, k),
    "conv2d": lambda sizes, k: torch.nn.Conv2d(*sizes, k),
    "conv3d": lambda sizes, k: torch.nn.Conv3d(*sizes, k + 1),  # PEFT itself fails on 1x1x1
    "experts": lambda sizes, k: Experts(k + 1, sizes, transposed=False),
    "transposed-experts": lambda sizes, k: Experts(k + 1, sizes, transposed=True),
    "router": lambda sizes, k: Experts(1, sizes, transposed=False),
}
DORA = ("linear", "conv1d-of-gpt2", "embedding", "conv1d", "conv2d", "conv3d")


class Model(torch.nn.Module):
    config = ModelConfig(model_type="none")

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def get_input_embeddings(self) -> torch.nn.Module:
        return torch.nn.Identity()

    get_output_embeddings = get_input_embeddings


def adapted(kind: str, sizes: Sizes, k: int, rank: int, dora: bool, rslora: bool) -> torch.nn.Module:
    layer, of = LAYERS[kind](sizes, k), {"target_modules": ["layer"]}
    if isinstance(layer, Experts):
        of = {"target_modules": [], "target_parameters": ["layer.stack"]}
        if kind == "router":
            layer.stack = torch.nn.Parameter(layer.stack.detach()[0])
    config = LoraConfig(r=rank, lora_alpha=7, use_dora=dora, use_rslora=rslora, **of)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT corrects fan_in_fan_out for Conv1D
        model = get_peft_model(Model(layer), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    return model


def prepared(model: torch.nn.Module) -> Shard:
    """The adapted weight, ready to be merged."""
    source = merging_source(model)
    shards = source.shards()
    assert list(source.prepare(tuple(range(len(shards))))) == [], "one rank asks no other"
    (shard,) = (each for each in shards if each.merge is not None)
    return shard


@pytest.mark.parametrize("kind", LAYERS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_part_equals_pefts_merge(kind: str, data: st.DataObject) -> None:
    """In fp32, in whatever dtype the trainer holds it."""
    torch.manual_seed(data.draw(st.integers(0, 9), label="seed"))
    sizes = data.draw(st.tuples(st.integers(2, 9), st.integers(2, 9)), label="sizes")
    dora = kind in DORA and data.draw(st.booleans(), label="dora")
    k, rank, rslora = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 4), st.booleans()))
    model = adapted(kind, sizes, k, rank, dora, rslora)
    model = model.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16]), label="dtype"))
    shard = prepared(model)
    run = shard.local()
    before = run.clone()
    cuts = sorted(data.draw(st.lists(st.integers(0, run.numel()), max_size=4), label="cuts"))
    parts = zip([0, *cuts], [*cuts, run.numel()], strict=True)
    assert shard.merge is not None
    merged = torch.cat([shard.merge(run[low:high], low).clone() for low, high in parts if low < high])
    assert torch.equal(run, before), "the trainer's memory was written"
    model.float().merge_adapter()  # type: ignore[operator]
    expected = next(iter(model.base_model.model.layer.get_base_layer().parameters())).detach()  # type: ignore[operator, union-attr]
    assert not torch.equal(expected.reshape(-1), before.float())
    torch.testing.assert_close(merged.view(expected.shape), expected, rtol=1e-5, atol=1e-5)


class Precisions(TorchDispatchMode):
    """In which precision fp32 is multiplied meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func._schema.name:
            self.found.add(torch.get_float32_matmul_precision())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("switch", "value"), [("allow_tf32", True), ("fp32_precision", "tf32")])
@pytest.mark.parametrize("dora", [False, True])
def test_a_trainer_that_allows_tf32_is_merged_without_it(
    switch: str, value: Any, dora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    switches = torch.backends.cuda.matmul
    if not hasattr(switches, switch):
        pytest.skip("this torch has one switch only")
    model = adapted("linear", (6, 5), 1, 2, dora, rslora=False)
    monkeypatch.setattr(switches, switch, value)
    with Precisions() as precisions:
        shard = prepared(model)
        assert shard.merge is not None
        shard.merge(shard.local(), 0)
    assert getattr(switches, switch) == value and precisions.found == {"highest"}


def test_a_grouped_convolution_is_refused_by_name() -> None:
    model = get_peft_model(Model(torch.nn.Conv1d(4, 4, 3, groups=2)), LoraConfig(r=2, target_modules=["layer"]))
    with pytest.raises(ValueError, match=r"'base_model.model.layer' is a convolution of 2 groups"):
        Adapters(model)


# Adapters that the engine serves


def chunk(trains_norm: bool = False, biased: bool = False) -> Any:
    """A layer whose weight is frozen, with an adapter, a norm and a router's bias."""
    model: Any = torch.nn.Module()
    model.proj = torch.nn.Module()
    model.proj.adapter = torch.nn.Linear(2, 2)
    model.norm = torch.nn.LayerNorm(2).requires_grad_(trains_norm)
    model.register_buffer("expert_bias", torch.zeros(2))
    model.config = SimpleNamespace(moe_router_enable_expert_bias=biased)
    return model


def look(monkeypatch: pytest.MonkeyPatch, **changes: bool) -> None:
    monkeypatch.setattr("verl_sync_plugin.trainers.megatron.trainer.unwrapped", lambda module: module)
    engine = Mock(module=[chunk(**changes)])
    engine.model_config.lora = {"rank": 4, "alpha": 8, "merge": False}
    backend: Any = get_sharding_manager("megatron", "sglang").backend
    backend(engine, SyncConfig(), torch.device("cpu"), "bfloat16").open_adapter(None).look()


@pytest.mark.parametrize(("change", "name"), [("trains_norm", "norm.weight"), ("biased", "expert_bias")])
def test_what_else_is_trained_is_refused(change: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look(monkeypatch)
    with pytest.raises(ValueError, match=rf"lora\.merge=False: '{name}' changes in training.*lora\.merge=True"):
        look(monkeypatch, **{change: True})


def test_an_adapter_says_what_sglang_requires() -> None:
    """verl 0.9.0's config of a Megatron adapter has no ``peft_type``, and PEFT's own has enums and sets."""
    layer, pack = "base_model.model.model.layers.0.", rollout_of("sglang").pack_adapter
    factors = {f"{layer}self_attn.{name}.lora_A.weight": torch.ones(2, 2) for name in ("v_proj", "q_proj")}
    adapter = {"task_type": TaskType.CAUSAL_LM, "r": 8, "target_modules": {"all-linear"}}
    for each in (adapter, {**adapter, "peft_type": PeftType.LORA}):
        (told, *_), _ = pack(each, factors)
        assert told == {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "target_modules": ["q_proj", "v_proj"]}
    with pytest.raises(ValueError, match=r"lora\.merge=False: .* factors of experts .*lora\.merge=True"):
        pack(adapter, {f"{layer}mlp.experts.3.up_proj.lora_B.weight": torch.ones(2, 2)})
