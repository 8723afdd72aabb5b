# SPDX-License-Identifier: Apache-2.0
"""Checks that the adapter in use arrives, of several with modules of their own to save. What cannot be merged, and all
of PEFT that is no LoRA layer, is refused by module and type before anything is sent."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import (
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PeftMixedModel,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
)
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from test_lora_merge import check_merged, peft_merge
from worlds import run_world

import tiny_models
from bare_engine import trainer
from contract.fsdp_models import (
    Layout,
    Variant,
    build,
    change,
    deliver,
    fsdp1,
    merging_source,
    peft_model,
    served_adapter,
    shard,
    torchs_own_state,
)
from contract.reading import LARGE, planned
from contract.sources import StandIn, endpoint_of
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.lora.peft import Adapters
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sharding_manager import get_sharding_manager
from verl_sync_plugin.sync.adapter import AdapterSender
from verl_sync_plugin.transport.agreement import Agreement

LAYOUTS = [Layout((1,)), Layout((2,)), fsdp1(2, True)]
HEAD = "lm_head.weight"


def two_adapters(in_use: str, second_saves: bool = True) -> PeftModel:
    """Two adapters with random factors; each may have a head of its own."""
    model = get_peft_model(build("qwen2"), LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    saved = ["lm_head"] if second_saves else None
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=saved))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    model.set_adapter(in_use)
    return model


def delivered_is_in_use(in_use: str, second_saves: bool, layout: Layout) -> None:
    reference = two_adapters(in_use, second_saves)
    module = shard(two_adapters(in_use, second_saves), layout)
    source = merging_source(module, "qwen2")
    for _ in range(2):
        expected = peft_merge(reference, torchs_own_state(module))
        check_merged(deliver(source), expected)
        change(module)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("in_use", "second_saves"), [("default", True), ("second", True), ("second", False), ("default", False)]
)
def test_the_adapter_in_use_arrives(in_use: str, second_saves: bool, layout: Layout) -> None:
    run_world(layout.size, delivered_is_in_use, in_use, second_saves, layout)


def switched_between_syncs() -> tuple[str, ...]:
    model = two_adapters("default")
    module: Any = shard(model, Layout((2,)))
    source = merging_source(module, "qwen2")
    first = deliver(source)
    texts = []
    module.set_adapter("second")
    for undo in (lambda: module.set_adapter("default"), module.base_model.enable_adapter_layers):
        with pytest.raises(ValueError) as caught:
            source.shards()
        texts.append(str(caught.value))
        undo()
        again = deliver(source)
        assert all(torch.equal(first[name], again[name]) for name in first)
        module.base_model.disable_adapter_layers()
    return tuple(texts)


def test_another_adapter_than_in_the_first_sync_is_refused_by_name() -> None:
    for other, off in run_world(2, switched_between_syncs):
        assert "self_attn.q_proj'" in other and "('default',)" in other and "now they are ('second',)" in other
        assert "now they are ('default',) (True, " in off


def one_copy_for_both_ends() -> None:
    """PEFT ties the copy, and it stays tied when FSDP2 shards it."""
    config = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    model: Any = peft_model(Variant("one-copy", "qwen2_tied", config))
    module = shard(model, Layout((2,)))
    source = merging_source(module, "qwen2")
    for _ in range(2):
        got = deliver(source)
        trained = torchs_own_state(module)["base_model.model.model.embed_tokens.modules_to_save.default.weight"]
        assert torch.equal(got[HEAD], trained.bfloat16()) and torch.equal(got["model.embed_tokens.weight"], got[HEAD])
        change(module)


def test_one_copy_for_embedding_and_head_arrives_as_both() -> None:
    run_world(2, one_copy_for_both_ends)


def with_an_unknown_factor() -> str:
    model: Any = peft_model(Variant("plain", config={"target_modules": ["q_proj"]}))
    factor = model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj.lora_A.default")
    factor.register_parameter("gain", torch.nn.Parameter(torch.ones(3)))
    source = merging_source(shard(model, Layout((2,))), "qwen2")
    with pytest.raises(ValueError) as caught:
        source.shards()
    return str(caught.value)


def test_a_factor_that_no_merge_takes_is_refused_by_name() -> None:
    for text in run_world(2, with_an_unknown_factor):
        assert "does not know the use of LoRA parameters: base_model.model.model.layers.1." in text
        assert "lora_A.default.gain" in text


def adapter_that_is_served() -> None:
    model: Any = get_peft_model(build("qwen2"), LoraConfig(r=3, target_modules=["q_proj"]))
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    expected = get_peft_model_state_dict(model)
    server, module = StandIn(), shard(model, Layout((2,)))
    source = merging_source(module, "qwen2", merge=False)
    sender = AdapterSender(served_adapter(module, source), torch.bfloat16, SyncConfig())
    asyncio.run(sender.send(Agreement(20.0), endpoint_of(server, leader=dist.get_rank() == 0), SyncReport(), None))
    for _, sent in server.adapters:
        assert sent.keys() == expected.keys()


def test_the_adapter_that_the_engine_serves_comes_alone() -> None:
    run_world(2, adapter_that_is_served)


TIED = Variant("one-adapter", "qwen2_tied", {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True})


def factors_of_both_ends(layout: Layout) -> None:
    """PEFT makes the head's factors transposed views of the embedding's; in FSDP1 each is a parameter of its own."""
    reference = peft_model(TIED)
    head: Any = reference.get_output_embeddings()
    del head.kwargs["tied_adapter"]  # what it would be tied with has a graph, which cannot be copied
    module = shard(peft_model(TIED), layout)
    source = merging_source(module, TIED.model)
    for bucket_bytes in (9_001, LARGE):
        state = {name: tensor.clone() for name, tensor in torchs_own_state(module).items()}
        expected = peft_merge(reference, state)
        got = deliver(source, bucket_bytes)
        check_merged(got, expected)
        with torch.no_grad():
            for number, parameter in enumerate(module.parameters()):
                parameter.mul_(1 + number / 16)
    assert not torch.equal(got["lm_head.weight"], got["model.embed_tokens.weight"]), "they have become two weights"


@pytest.mark.parametrize("layout", [fsdp1(1, True), fsdp1(2, True)], ids=str)
def test_transposed_factors_are_merged_right(layout: Layout) -> None:
    run_world(layout.size, factors_of_both_ends, layout)


def adapted_and_transposed() -> str:
    model = peft_model(Variant("plain", config={"target_modules": ["q_proj"]}))
    layer: Any = model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj.base_layer")
    layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t(), requires_grad=False)
    module = shard(model, fsdp1(2, True))
    served = merging_source(module, "qwen2", merge=False)
    planned(served, LARGE)  # the base as it is
    with pytest.raises(ValueError) as caught:
        merging_source(module, "qwen2").shards()
    return str(caught.value)


def test_an_adapted_weight_in_another_order_is_refused_by_name() -> None:
    for text in run_world(2, adapted_and_transposed):
        assert "'model.layers.1.self_attn.q_proj.weight'" in text and "strides (1, " in text


# What is refused


TARGETS = {"target_modules": ["q_proj", "down_proj"]}
SETTINGS: dict[str, dict[str, Any]] = {
    "IA3": {**TARGETS, "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "LOHA": TARGETS,
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [1]},
    "VERA": {"target_modules": ["q_proj"]},
}


def other(kind: str) -> Any:
    """A model with an adapter of that type."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    return get_peft_model(build("llama"), config(**SETTINGS[kind], task_type="CAUSAL_LM"))


def refusal(model: torch.nn.Module) -> str:
    with pytest.raises(ValueError) as caught:
        Adapters(model)
    assert "custom.sync.enabled=False" in str(caught.value), "names no remedy"
    return str(caught.value)


@pytest.mark.parametrize("kind", SETTINGS)
def test_an_adapter_of_another_type_is_refused_by_name(kind: str) -> None:
    assert f"peft_type={kind}" in refusal(other(kind))


@pytest.mark.parametrize("kind", SETTINGS)
def test_so_is_its_first_module_where_no_config_tells(kind: str) -> None:
    """Layers that were put in by hand, or a config that was taken away."""
    model = other(kind)
    for module in model.modules():
        for attribute in ("peft_config", "_peft_config"):
            vars(module).pop(attribute, None)
    text = refusal(model)
    named = [name for name, _ in model.named_modules() if f"{name!r}" in text]
    assert named, text
    of_peft = type(model.get_submodule(named[0]))
    assert of_peft.__module__.startswith("peft.") and f"is a {of_peft.__name__}" in text


def switched_off() -> Any:
    model = two_adapters("default")
    model.base_model.disable_adapter_layers()
    return model


def both_active() -> Any:
    model = get_peft_model(build("qwen2"), LoraConfig(r=3, target_modules=["q_proj"]))
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return model


def with_another_type() -> Any:
    mixed = PeftMixedModel(build("qwen2"), LoraConfig(target_modules=["q_proj"]))
    mixed.add_adapter("other", LoHaConfig(target_modules=["v_proj"]))
    mixed.set_adapter(["default", "other"])
    return mixed


def over_another_type() -> Any:
    base = inject_adapter_in_model(IA3Config(target_modules=["v_proj"], feedforward_modules=[]), build("qwen2"))
    del base.peft_config
    return get_peft_model(base, LoraConfig(target_modules=["q_proj"]))


def lora(model: str = "qwen2", **config: Any) -> Any:
    return get_peft_model(build(model), LoraConfig(r=3, target_modules=["q_proj"], **config))


MODULE = r"LoRA module 'base_model.*"


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: lora("llama", lora_bias=True), f"{MODULE} none in its base layer"),
        (lambda: lora(alora_invocation_tokens=[1]), f"{MODULE}ALoraLinearVariant"),
        (lambda: lora(trainable_token_indices=[1]), r"adapter 'default' has trainable_token_indices=\[1\]"),
        (both_active, "several active adapters"),
        (switched_off, r"q_proj' is switched off"),
        (with_another_type, "LOHA"),
        (over_another_type, r"layers\.0\.self_attn\.v_proj' is a Linear of PEFT .*ia3"),
    ],
    ids=["bias", "alora", "tokens", "both", "off", "with", "over"],
)
def test_what_cannot_be_merged_is_refused_by_name(made: Callable[[], Any], text: str) -> None:
    assert re.search(text, refusal(made()))


def test_two_copies_of_a_module_in_use_are_refused_by_name() -> None:
    model: Any = two_adapters("default")
    model.get_output_embeddings()._active_adapter = ["default", "second"]
    with pytest.raises(ValueError, match=r"lm_head', one of modules_to_save, has several active adapters"):
        Adapters(model)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write("qwen2", tmp_path_factory.mktemp("others") / "model")


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("ia3")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    config = IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(str(folder))
    assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "IA3"
    return folder


def opened(checkpoint: str, model: dict[str, Any], strategy: str) -> str:
    """Returns the error of the first step of the first sync of verl's own engine."""
    settings = {"use_orig_params": True} if strategy == "fsdp" else {}
    engine = trainer.build(checkpoint, strategy, model={"lora_rank": 4, **model}, **settings)
    manager = get_sharding_manager(strategy, "sglang")
    with pytest.raises(ValueError) as caught:
        manager(engine, endpoint_of(StandIn()), SyncConfig(), 1 << 20, torch.device("cpu")).open_source()
    return str(caught.value)


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_an_adapter_that_verl_loads_is_refused(strategy: str, merge: bool, checkpoint: Path, adapter: Path) -> None:
    loaded = {"lora_adapter_path": str(adapter), "lora": {"merge": merge}}
    (text,) = run_world(1, opened, str(checkpoint), loaded, strategy)
    assert "peft_type=IA3" in text
