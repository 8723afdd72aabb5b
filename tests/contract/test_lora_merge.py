# SPDX-License-Identifier: Apache-2.0
"""Compares LoRA merged while streaming with PEFT's own fp32 merge; the trainer's weights are never written."""

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import AutoModelForCausalLM
from verl.workers.engine.fsdp.transformer_impl import unfuse_moe_params
from worlds import on_ranks

from bare_engine import trainer
from contract import fsdp_models
from contract.fsdp_models import Layout, Variant, change, fsdp1, merging_source, peft_model, shard, torchs_own_state
from contract.reading import LARGE, Reader, State, check_syncs, sync
from contract.sources import raised_alike

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SECOND = {"target_modules": ["q_proj", "v_proj"]}

VARIANTS = [
    Variant("all-linear", config={"target_modules": "all-linear"}),
    Variant("regex", "llama", {"target_modules": r".*\.(q_proj|down_proj)$"}),
    Variant("rslora", "qwen3", {"target_modules": ALL, "use_rslora": True}),
    Variant("patterns", config={"target_modules": ALL, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}}),
    Variant("embedding-and-head", config={"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    Variant("excluded", config={"target_modules": "all-linear", "exclude_modules": ["up_proj"]}),
    Variant("trained-bias", config={"target_modules": ["q_proj"], "bias": "lora_only"}),
    Variant("experts", "qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    Variant("router", "qwen3_moe", {"target_modules": [], "target_parameters": ["mlp.gate.weight"]}),
    Variant("first-of-two", "qwen2", {"target_modules": ["q_proj"]}, SECOND),
    Variant("second-of-two", "qwen2", {"target_modules": ["q_proj"]}, SECOND, "second"),
]
# FSDP1 with use_orig_params=False refuses a unit of trainable and frozen parameters
MIXED = {"embedding-and-head", "trained-bias"}


def peft_merge(reference: PeftModel, state: State, merge: bool = True) -> State:
    """PEFT's own merge of the gathered weights, fp32, cast once."""
    model = copy.deepcopy(reference)
    model.load_state_dict(state)
    merged = model.merge_and_unload() if merge else model.unload()
    parameters = {name for name, _ in merged.named_parameters()}
    cast = {name: t.bfloat16() if name in parameters else t for name, t in merged.state_dict().items()}
    return dict(unfuse_moe_params(cast.items(), model.config.model_type))


def within_one_ulp(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Allows the rounding of the fp32 product, which shows where weight and delta cancel."""
    ulp = torch.nextafter(expected.abs(), torch.tensor(torch.inf, dtype=expected.dtype)) - expected.abs()
    return got.dtype == expected.dtype and bool(((got - expected).abs() <= ulp.clamp(min=4e-6)).all())


def check_merged(got: State, expected: State) -> None:
    assert sorted(got) == sorted(expected)
    for name, tensor in expected.items():
        near = within_one_ulp if tensor.dtype == torch.bfloat16 else torch.equal
        assert got[name].shape == tensor.shape and near(got[name], tensor), (name, (got[name] - tensor).abs().max())


def cases() -> Iterator[Any]:
    """Yields every variant under every sharding that takes it; neighbours in the list take turns."""
    for number, variant in enumerate(VARIANTS):
        some = variant.name in ("patterns", "experts")
        yield pytest.param(Layout((2, 2)), variant, marks=() if some else pytest.mark.extended)
        few, odd = (1 + number // 2 % 2,), number % 2
        yield Layout(few if odd else (3,)), variant
        both = [fsdp1(3 if odd else 2, True), fsdp1(2 if odd else 3)]
        if variant.name in MIXED or variant.second is not None:
            both.pop()
        elif odd:
            both.reverse()
        for layout, marks in zip(both, ((), pytest.mark.extended), strict=False):
            yield pytest.param(layout, variant, marks=marks)
    # Under a single layout: shards are in host memory for good, moved and merged in pieces
    yield Layout((2,), offloaded=True), VARIANTS[0]
    yield Layout((2,), units=True), Variant("units", config={"target_modules": ["q_proj", "down_proj", "embed_tokens"]})


@pytest.mark.parametrize(("layout", "variant"), [*cases()], ids=lambda value: getattr(value, "name", str(value)))
@on_ranks("layout")
def test_merge_equals_pefts(layout: Layout, variant: Variant) -> None:
    reference: Any = peft_model(variant)
    module = shard(peft_model(variant), layout)

    def expected() -> State:
        state = torchs_own_state(module)
        merged, plain = peft_merge(reference, state), peft_merge(reference, state, merge=False)
        assert any(not torch.equal(tensor, plain[name]) for name, tensor in merged.items()), "nothing is to be merged"
        return merged

    source = merging_source(module)
    check_syncs(source, expected, lambda: change(module), [module], check_merged, rounds=1)
    if layout.units:
        assert {type(each).__name__ for each in module.modules()} >= {"FSDPLinear", "FSDPEmbedding"}
        assert {weight.transposed for weight in source.weights.values()} == {False, True}, "layers and an embedding"


@pytest.mark.parametrize("layout", [Layout((2,)), fsdp1(2, True)], ids=str)
@pytest.mark.parametrize("adapted", [["embed_tokens", "q_proj"], ["lm_head"], ["embed_tokens", "lm_head"]])
@on_ranks(2)
def test_an_adapted_end_of_a_tied_model_is_served_but_not_merged(layout: Layout, adapted: list[str]) -> None:
    module = shard(peft_model(Variant("tied", "qwen2_tied", {"target_modules": adapted})), layout)
    text = raised_alike(ValueError, merging_source(module).shards)
    assert "changes 'model.embed_tokens.weight'" in text or "changes 'lm_head.weight'" in text, text
    assert "are tied" in text and "exclude_modules" in text
    base = sync(merging_source(module, merge=False))
    state = torchs_own_state(module)
    name = next(name for name in state if "embed_tokens" in name and "lora_" not in name)
    assert torch.equal(base["model.embed_tokens.weight"], state[name].bfloat16()) and "lm_head.weight" not in base


@on_ranks(1)
def test_a_loaded_adapter_brings_its_own_settings(qwen2: str, tmp_path: Path) -> None:
    """Covers verl's ``lora_adapter_path``: rsLoRA and patterns, by verl's own engine."""
    settings = {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 5}}
    config = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **settings)
    saved = get_peft_model(base_of(qwen2), config)
    for name, parameter in saved.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape))
    saved.save_pretrained(str(tmp_path))
    engine: Any = trainer.build(qwen2, "fsdp2", model={"lora_adapter_path": str(tmp_path), "lora_rank": 4})
    reference = PeftModel.from_pretrained(base_of(qwen2), str(tmp_path))
    assert sum("lora_" in name for name in reference.state_dict()) == 2 * 2 * 2
    expected = peft_merge(reference, reference.state_dict())
    got = sync(merging_source(engine.module))
    check_merged(got, expected)
    plain = base_of(qwen2).state_dict()["model.layers.0.mlp.down_proj.weight"].bfloat16()
    assert not torch.equal(got["model.layers.0.mlp.down_proj.weight"], plain)


def base_of(checkpoint: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


TARGETS = ["q_proj", "down_proj"]
# What cannot be merged, and all of PEFT that is no LoRA layer, is refused by module and type before anything is sent
SETTINGS: dict[str, dict[str, Any]] = {
    "IA3": {"target_modules": TARGETS, "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "LOHA": {"target_modules": TARGETS},
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [1]},
    "VERA": {"target_modules": ["q_proj"]},
}
LORA = LoraConfig(target_modules=["q_proj"])
PLAIN = Variant("plain", config={"target_modules": ["q_proj"]})
TWO = Variant("two", config=PLAIN.config, second=SECOND)


def refusal(model: torch.nn.Module) -> str:
    with pytest.raises(ValueError) as caught:
        merging_source(model)
    text = str(caught.value)
    remedies = r"checkpoint of \S+\.model\.path|exclude_modules|Switch it on|Activate one|Use peft\.get_peft_model"
    assert re.search(remedies, text), "names no remedy"
    return text


@pytest.mark.parametrize("kind", SETTINGS)
def test_an_adapter_of_another_type_is_refused_by_name(kind: str) -> None:
    """Or its first module, where no config tells: layers were put in by hand, or a config was taken away."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind](**SETTINGS[kind], task_type="CAUSAL_LM")
    model = get_peft_model(fsdp_models.build("llama"), config)
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


def unlabelled(**config: Any) -> Any:
    """Returns a model whose config does not tell."""
    model = lora(**config)
    for field in config:
        setattr(model.peft_config["default"], field, None)
    return model


def of_two(change: Callable[[Any], object], variant: Variant = TWO) -> Any:
    model = peft_model(variant)
    change(model)
    return model


def with_another_type() -> Any:
    mixed = peft.PeftMixedModel(fsdp_models.build("qwen2"), LORA)
    mixed.add_adapter("other", peft.LoHaConfig(target_modules=["v_proj"]))
    mixed.set_adapter(["default", "other"])
    return mixed


def over_another_type() -> Any:
    base = peft.inject_adapter_in_model(
        peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[]), fsdp_models.build("qwen2")
    )
    del base.peft_config
    return get_peft_model(base, LORA)


MODULE, BOTH = r"LoRA module 'base_model.*", ["default", "second"]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: lora(lora_bias=True), "adapter 'default' has lora_bias=True"),
        (lambda: lora(use_dora=True), "adapter 'default' has use_dora=True"),
        (lambda: unlabelled(use_dora=True), f"{MODULE}DoraLinearVariant"),
        (lambda: lora(modules_to_save=["lm_head"]), r"adapter 'default' has modules_to_save=\['lm_head'\]"),
        (lambda: unlabelled(modules_to_save=["lm_head"]), "lm_head' is a ModulesToSaveWrapper of PEFT"),
        (lambda: lora(alora_invocation_tokens=[1]), f"{MODULE}ALoraLinearVariant"),
        (lambda: lora(trainable_token_indices=[1]), r"adapter 'default' has trainable_token_indices=\[1\]"),
        (
            lambda: of_two(lambda model: model.base_model.set_adapter(BOTH), replace(PLAIN, second=PLAIN.config)),
            "several active adapters",
        ),
        (lambda: of_two(lambda model: model.base_model.disable_adapter_layers()), r"q_proj' is switched off"),
        (with_another_type, "LOHA"),
        (over_another_type, r"layers\.0\.self_attn\.v_proj' is a Linear of PEFT .*ia3"),
        (lambda: peft.inject_adapter_in_model(LORA, fsdp_models.build("qwen2")), "into a Qwen2ForCausalLM itself"),
    ],
    ids=["bias", "dora", "dora-variant", "saved", "head", "alora", "tokens", "both", "off", "with", "over", "injected"],
)
def test_what_cannot_be_merged_is_refused_by_name(made: Callable[[], Any], text: str) -> None:
    assert re.search(text, refusal(made()))


@on_ranks(2)
def test_a_factor_of_unknown_use_is_refused_by_name() -> None:
    model: Any = peft_model(PLAIN)
    factor = model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj.lora_A.default")
    factor.register_parameter("gain", torch.nn.Parameter(torch.ones(3)))
    text = raised_alike(ValueError, merging_source(shard(model, Layout((2,)))).shards)
    assert "does not know the use of LoRA parameters: base_model.model.model.layers.1." in text
    assert "lora_A.default.gain" in text


@on_ranks(2)
def test_a_transposed_weight_travels_as_it_is_and_is_not_merged() -> None:
    model = peft_model(PLAIN)
    layer: Any = model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj.base_layer")
    layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t(), requires_grad=False)
    module = shard(model, fsdp1(2, True))
    Reader(merging_source(module, merge=False)).shards(LARGE)
    text = raised_alike(ValueError, merging_source(module).shards)
    assert "'model.layers.1.self_attn.q_proj.weight'" in text and "strides (1, " in text


@on_ranks(2)
def test_adapters_that_are_switched_between_syncs_are_refused_until_they_are_switched_back() -> None:
    """Another adapter than in the first sync, then none; each time the sync after it is as the first."""
    module: Any = shard(peft_model(TWO), Layout((2,)))
    source = merging_source(module)
    first = sync(source)
    module.set_adapter("second")
    for now, undo in (
        ("(('second',), False", lambda: module.set_adapter("default")),
        ("(('default',), True", module.base_model.enable_adapter_layers),
    ):
        text = raised_alike(ValueError, source.shards)
        assert all(words in text for words in ("self_attn.q_proj'", "('default',)", f"now they are {now}")), text
        undo()
        again = sync(source)
        assert all(torch.equal(first[name], again[name]) for name in first)
        module.base_model.disable_adapter_layers()
    module.base_model.enable_adapter_layers()
    config = module.peft_config["default"]
    module.delete_adapter("default")
    module.add_adapter("default", config)
    module.set_adapter("default")
    assert "(('default',), False, False), added again, and the engine" in raised_alike(ValueError, source.shards)
