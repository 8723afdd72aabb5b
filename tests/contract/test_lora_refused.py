# SPDX-License-Identifier: Apache-2.0
"""Refuses by module and type, before anything is sent, what cannot be merged, and all of PEFT that is no LoRA layer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftMixedModel, get_peft_model, inject_adapter_in_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from worlds import on_ranks

from contract.fsdp_models import Layout, Variant, build, fsdp1, merging_source, peft_model, shard
from contract.reading import LARGE, Reader, sync

TARGETS = {"target_modules": ["q_proj", "down_proj"]}
SETTINGS: dict[str, dict[str, Any]] = {
    "IA3": {**TARGETS, "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "LOHA": TARGETS,
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [1]},
    "VERA": {"target_modules": ["q_proj"]},
}
SAVED_HEAD = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
PLAIN = Variant("plain", config={"target_modules": ["q_proj"]})
TWO = Variant("two", config=SAVED_HEAD, second={**SAVED_HEAD, "target_modules": ["q_proj", "v_proj"]})


def refusal(model: torch.nn.Module) -> str:
    with pytest.raises(ValueError) as caught:
        merging_source(model)
    text = str(caught.value)
    assert "custom.sync.enabled=False" in text or "Activate one of them (set_adapter)" in text, "names no remedy"
    return text


@pytest.mark.parametrize("kind", SETTINGS)
def test_an_adapter_of_another_type_is_refused_by_name(kind: str) -> None:
    """Or its first module, where no config tells: layers were put in by hand, or a config was taken away."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind](**SETTINGS[kind], task_type="CAUSAL_LM")
    model = get_peft_model(build("llama"), config)
    assert f"peft_type={kind}" in refusal(model)
    for module in model.modules():
        for attribute in ("peft_config", "_peft_config"):
            vars(module).pop(attribute, None)
    text = refusal(model)
    named = [name for name, _ in model.named_modules() if f"{name!r}" in text]
    assert named, text
    of_peft = type(model.get_submodule(named[0]))
    assert of_peft.__module__.startswith("peft.") and f"is a {of_peft.__name__}" in text


def lora(model: str = "qwen2", **config: Any) -> Any:
    return peft_model(Variant("lora", model, {**PLAIN.config, **config}))


def of_two(change: Callable[[Any], object], variant: Variant = TWO) -> Any:
    model = peft_model(variant)
    change(model)
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


MODULE, BOTH = r"LoRA module 'base_model.*", ["default", "second"]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: lora("llama", lora_bias=True), f"{MODULE} none in its base layer"),
        (lambda: lora(alora_invocation_tokens=[1]), f"{MODULE}ALoraLinearVariant"),
        (lambda: lora(trainable_token_indices=[1]), r"adapter 'default' has trainable_token_indices=\[1\]"),
        (
            lambda: of_two(lambda model: model.base_model.set_adapter(BOTH), replace(PLAIN, second=PLAIN.config)),
            "several active adapters",
        ),
        (lambda: of_two(lambda model: model.base_model.disable_adapter_layers()), r"q_proj' is switched off"),
        (
            lambda: of_two(lambda model: setattr(model.get_output_embeddings(), "_active_adapter", BOTH)),
            "lm_head', one of modules_to_save, has several active adapters",
        ),
        (with_another_type, "LOHA"),
        (over_another_type, r"layers\.0\.self_attn\.v_proj' is a Linear of PEFT .*ia3"),
    ],
    ids=["bias", "alora", "tokens", "both", "off", "heads", "with", "over"],
)
def test_what_cannot_be_merged_is_refused_by_name(made: Callable[[], Any], text: str) -> None:
    assert re.search(text, refusal(made()))


# What only the sharded model shows


def error_of(source: Any) -> str:
    with pytest.raises(ValueError) as caught:
        source.shards()
    return str(caught.value)


@on_ranks(2)
def test_a_factor_of_unknown_use_is_refused_by_name() -> None:
    model: Any = peft_model(PLAIN)
    factor = model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj.lora_A.default")
    factor.register_parameter("gain", torch.nn.Parameter(torch.ones(3)))
    text = error_of(merging_source(shard(model, Layout((2,)))))
    assert "does not know the use of LoRA parameters: base_model.model.model.layers.1." in text
    assert "lora_A.default.gain" in text


@on_ranks(2)
def test_a_transposed_weight_travels_as_it_is_and_is_not_merged() -> None:
    model = peft_model(PLAIN)
    layer: Any = model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj.base_layer")
    layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t(), requires_grad=False)
    module = shard(model, fsdp1(2, True))
    Reader(merging_source(module, merge=False)).shards(LARGE)
    text = error_of(merging_source(module))
    assert "'model.layers.1.self_attn.q_proj.weight'" in text and "strides (1, " in text


@on_ranks(2)
def test_adapters_that_are_switched_between_syncs_are_refused_until_they_are_switched_back() -> None:
    """Another adapter than in the first sync, then none; each time the sync after it is as the first."""
    module: Any = shard(peft_model(TWO), Layout((2,)))
    source = merging_source(module)
    first = sync(source)
    module.set_adapter("second")
    for now, undo in (
        ("('second',)", lambda: module.set_adapter("default")),
        ("('default',) (True, ", module.base_model.enable_adapter_layers),
    ):
        text = error_of(source)
        assert all(words in text for words in ("self_attn.q_proj'", "('default',)", f"now they are {now}")), text
        undo()
        again = sync(source)
        assert all(torch.equal(first[name], again[name]) for name in first)
        module.base_model.disable_adapter_layers()
