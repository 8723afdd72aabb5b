# SPDX-License-Identifier: Apache-2.0
"""Compares any part of a merged weight with PEFT's own merge, and names what an engine would leave out."""

import itertools
import random
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, PeftType, TaskType, get_peft_model
from transformers.pytorch_utils import Conv1D

from contract.fsdp_models import ModelConfig, merging_source
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.tensors import Shard
from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.sharding_manager import get_sharding_manager


class Experts(torch.nn.Module):
    """Fused expert weights, (experts, out, in) or (experts, in, out); or a router's."""

    def __init__(self, *shape: int, transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = transposed
        self.stack = torch.nn.Parameter(torch.randn(shape))


class Model(torch.nn.Module):
    """A layer of every kind, or experts, which PEFT takes in a model of their own."""

    config = ModelConfig(model_type="none")

    def __init__(self, first: int, second: int, k: int, experts: bool = False) -> None:
        super().__init__()
        if experts:
            self.experts = Experts(k + 1, first, second)
            self.turned = Experts(k + 1, first, second, transposed=True)
            self.router = Experts(first, second)
            return
        self.linear = torch.nn.Linear(first, second)
        self.gpt2 = Conv1D(first, second)
        self.embedding = torch.nn.Embedding(first, second)

    def get_input_embeddings(self) -> torch.nn.Module:
        return torch.nn.Identity()

    get_output_embeddings = get_input_embeddings


def adapted(model: Model, rank: int = 2, **config: Any) -> Any:
    kinds = dict(model.named_children())
    of: dict[str, Any] = {"target_modules": list(kinds)}
    if "experts" in kinds:
        of = {"target_modules": [], "target_parameters": [f"{name}.stack" for name in kinds]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT corrects fan_in_fan_out for Conv1D
        made = get_peft_model(model, LoraConfig(r=rank, lora_alpha=7, **of, **config))
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    return made


def prepared(model: torch.nn.Module) -> dict[str, Shard]:
    """The adapted weights by layer, ready to be merged."""
    source = merging_source(model)
    shards = source.shards()
    assert list(source.prepare(tuple(range(len(shards))))) == [], "one rank asks no other"
    return {each.base.views[0].name.partition(".")[0]: each for each in shards if each.merge is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("experts", "settings"), [(False, {}), (False, {"use_rslora": True}), (True, {}), (True, {"use_rslora": True})]
)
def test_any_part_equals_pefts_merge(experts: bool, settings: Any, seed: int, dtype: torch.dtype) -> None:
    """In fp32, in whatever dtype the trainer holds it."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    first, second, k, rank = (chance.randint(low, high) for low, high in ((2, 9), (2, 9), (1, 3), (1, 4)))
    model = adapted(Model(first, second, k, experts), rank, **settings).to(dtype)
    before, merged = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    shards = prepared(model)
    assert shards.keys() == dict(model.base_model.model.named_children()).keys()
    for name, shard in shards.items():
        run = shard.local()
        before[name] = run.clone()
        cuts = sorted(chance.randint(0, run.numel()) for _ in range(4))
        parts = itertools.pairwise([0, *cuts, run.numel()])
        merged[name] = torch.cat([shard.merge(run[low:high], low).clone() for low, high in parts if low < high])
        assert torch.equal(run, before[name]), "the trainer's memory was written"
    model.float().merge_adapter()
    for name, layer in model.base_model.model.named_children():
        expected = next(iter(layer.get_base_layer().parameters())).detach()
        assert not torch.equal(expected.reshape(-1), before[name].float())
        torch.testing.assert_close(merged[name].view(expected.shape), expected, rtol=1e-5, atol=1e-5)


def test_a_convolution_is_refused_by_name() -> None:
    model = Model(4, 4, 3)
    model.conv1d = torch.nn.Conv1d(4, 4, 3)
    with pytest.raises(ValueError, match=r"'base_model.model.conv1d' is a Conv1d: .*exclude_modules"):
        merging_source(adapted(model))


@pytest.mark.parametrize(
    ("norm", "rate", "named"), [(False, 0.0, ""), (True, 0.0, "norm.weight"), (False, 1e-3, "expert_bias")]
)
def test_what_megatron_trains_too_is_named(
    norm: bool, rate: float, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = torch.nn.ModuleDict({"adapter": torch.nn.Linear(2, 2)})
    chunk: Any = torch.nn.ModuleDict({"proj": adapted, "norm": torch.nn.LayerNorm(2)})
    chunk["norm"].requires_grad_(norm)
    chunk.register_buffer("expert_bias", torch.zeros(2))  # of a router
    chunk.config = SimpleNamespace(moe_router_enable_expert_bias=True, moe_router_bias_update_rate=rate)
    monkeypatch.setattr("verl_sync_plugin.trainers.megatron.trainer.unwrapped", lambda module: module)
    engine = Mock(module=[chunk])
    engine.model_config.lora = {"rank": 4, "alpha": 8, "merge": False}
    backend: Any = get_sharding_manager("megatron", "sglang").backend
    source = backend(engine, SyncConfig(), torch.device("cpu"), "bfloat16").open_adapter(None)
    said = rf"lora\.merge=False: '{named}' changes in training.*lora\.merge=True"
    with pytest.raises(ValueError, match=said) if named else nullcontext():
        next(source.gather("run"))


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
