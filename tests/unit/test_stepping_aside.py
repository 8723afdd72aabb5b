# SPDX-License-Identifier: Apache-2.0
"""Models that no sync gets right, and runs that the plugin cannot serve and stock verl can: one line, and verl's own
config leaves the driver.

Refused where a key of the plugin was given, and where stock verl would be wrong without an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Llama4TextConfig, PretrainedConfig

from hydra_run import config_of, multirun, refused, rollout_of
from verl_sync_plugin.config.settings import KEY_PREFIX, SHORT_BUCKET_KEY, TURN_OFF
from verl_sync_plugin.hooks.driver import settle
from verl_sync_plugin.rollouts.sglang.adapter import SyncServerAdapter
from verl_sync_plugin.rollouts.sglang.refusals import refuse_keys
from verl_sync_plugin.sharding_manager import _managers, register_sharding_manager
from verl_sync_plugin.sync.manager import ShardingManager

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
STRATEGY = "actor_rollout_ref.actor.strategy"
MEGATRON = "actor_rollout_ref.actor.megatron"
ARGUMENTS = f"{ROLLOUT}.engine_kwargs.sglang"
FP8 = f"{ROLLOUT}.quantization=fp8"
DRAFTING = f"+{ARGUMENTS}.speculative_algorithm"
MTP = (f"{MODEL}.mtp.enable=True", f"{MODEL}.mtp.enable_rollout=True")
VERLS = "verl.workers.config.RolloutConfig"
OFF = {"sync": {"enabled": False}}


def checkpoint(folder: Path, architecture: str, **config: Any) -> str:
    """The override that names a model of this architecture."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    return f"{MODEL}.path={model}"


def line_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the driver prints."""
    said = [line for line in capsys.readouterr().out.splitlines() if "[verl-sync-plugin]" in line]
    assert len(said) == 1, said
    return said[0]


CASES = [
    ((FP8,), f"{ROLLOUT}.quantization='fp8': weight sync sends plain weights"),
    (MTP, f"{ROLLOUT}.mtp.enable_rollout=True: weight sync has no draft model"),
    ((f"{ROLLOUT}.disaggregation.enabled=True",), f"{ROLLOUT}.disaggregation.enabled=True: weight sync serves one"),
    (("model_engine=megatron", f"{MEGATRON}.use_megatron_fsdp=True"), f"{MEGATRON}.use_megatron_fsdp=True: "),
    (
        ("model_engine=megatron", f"{MEGATRON}.vanilla_mbridge=True"),
        f"{MEGATRON}.vanilla_mbridge=True: weight sync serves Megatron-Bridge",
    ),
    ((f"{DRAFTING}=NEXTN",), f"{ARGUMENTS}.speculative_algorithm='NEXTN' without "),
    ((f"{ROLLOUT}.dtype=auto",), f"{ROLLOUT}.dtype='auto': "),
]


@pytest.mark.parametrize(("overrides", "cause"), CASES)
def test_stock_verl_moves_the_weights_and_one_line_says_so(
    overrides: tuple[str, ...], cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout = rollout_of(checkpoint(tmp_path, "Qwen2ForCausalLM"), *overrides)
    assert rollout._target_ == VERLS and rollout.custom == OFF
    line = line_of(capsys)
    assert "weight sync NOT IN USE, stock verl moves the weights. " + cause in line and "KNOWN" not in line, line


@pytest.mark.parametrize(
    ("overrides", "cause", "asked"),
    [
        *[(*case, f"{SHORT_BUCKET_KEY}=64") for case in CASES],
        (*CASES[0], f"{KEY_PREFIX}.verify=always"),
        (*CASES[0], f"{KEY_PREFIX}.enabled=True"),
        (*CASES[0], "+sync=colocated"),
    ],
)
def test_refused_where_a_key_of_the_plugin_asks_for_it(
    overrides: tuple[str, ...], cause: str, asked: str, tmp_path: Path
) -> None:
    text = refused(checkpoint(tmp_path, "Qwen2ForCausalLM"), *overrides, asked)
    assert cause in text and f"so {asked} cannot be followed. Remove that key" in text and "enabled=False" in text


def test_a_rank_that_stock_verl_does_not_read_is_refused(tmp_path: Path) -> None:
    """It would train all parameters where the user has asked for an adapter."""
    text = refused(checkpoint(tmp_path, "Qwen2ForCausalLM"), FP8, f"{MODEL}.lora.rank=8")
    assert f"{MODEL}.lora.rank=8 with stock verl's trainer: verl's own" in text and f"{MODEL}.lora_rank=8" in text


def test_a_job_of_a_multirun_steps_aside_in_the_trainer(tmp_path: Path) -> None:
    (config,) = multirun(tmp_path, f"{ROLLOUT}.name=sglang", checkpoint(tmp_path, "Qwen2ForCausalLM"), FP8)
    assert settle(config, resolved=True).startswith("weight sync NOT IN USE")
    assert config.actor_rollout_ref.rollout.custom.sync.enabled is False


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        *[
            (name, {})
            for name in (
                *("LlamaForCausalLM", "MistralForCausalLM", "Ministral3ForCausalLM", "Phi3ForCausalLM"),
                *("MixtralForCausalLM", "PhiMoEForCausalLM", "GraniteMoeForCausalLM", "Lfm2MoeForCausalLM"),
                *("Qwen2MoeForCausalLM", "Qwen3NextForCausalLM", "OPTForCausalLM"),
            )
        ],
        *[
            (f"{name}ForConditionalGeneration", {"vision_config": {}})
            for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Glm4v", "Gemma3", "Llama4")
        ],
    ],
)
def test_fp8_that_stock_verl_gets_wrong_is_refused(architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    text = refused(checkpoint(tmp_path, architecture, **config), FP8)
    assert f"{ROLLOUT}.quantization='fp8' with {MODEL}.path=" in text and architecture in text
    assert "wrong weights, without an error. Remove" in text and f"{KEY_PREFIX}.enabled=False" in text


@pytest.mark.parametrize(
    "architecture",
    [
        *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM", "Gemma2ForCausalLM"),
        *("OlmoeForCausalLM", "Ernie4_5_MoeForCausalLM"),
    ],
)
def test_fp8_that_is_right_needs_no_warning(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint_in_fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    rollout_of(checkpoint(tmp_path, architecture, **checkpoint_in_fp8), FP8)
    assert line_of(capsys).endswith("weight sync sends plain weights.")


def test_fp8_of_an_unknown_family_says_that_nobody_has_looked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout_of(checkpoint(tmp_path, "NewForCausalLM"), FP8)
    assert "NOT KNOWN whether verl's fp8 puts the right weights of NewForCausalLM" in line_of(capsys)
    rollout_of(f"{MODEL}.path=/no/such/model", FP8)
    assert "NOT KNOWN whether verl's fp8 puts the right weights of the model /no/such/model" in line_of(capsys)
    rollout_of(checkpoint(tmp_path, "DeepseekV3ForCausalLM"), FP8)
    assert "With DeepseekV3ForCausalLM SGLang is known to end at the first sync of verl's fp8" in line_of(capsys)


def test_fp8_of_a_model_on_the_hub_is_judged_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ({"architectures": ["LlamaForCausalLM"]}, {})
    monkeypatch.setattr(PretrainedConfig, "get_config_dict", lambda name: answer if name == "some/llama" else None)
    text = refused(f"{MODEL}.path=some/llama", FP8)
    assert "(LlamaForCausalLM), so SGLang would generate with wrong" in text


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        ((f"{MODEL}.lora_rank=8",), f"{ROLLOUT}.quantization='fp8' with {MODEL}.lora.merge=False and LoRA rank 8: "),
        ((f"{ROLLOUT}.quantization=int8",), f"{ROLLOUT}.quantization='int8': verl quantizes for SGLang to fp8 alone"),
        (("+" + ARGUMENTS + ".json_model_override_args='{}'",), f"{ARGUMENTS}.json_model_override_args="),
        (
            ("model_engine=megatron", f"{MEGATRON}.vanilla_mbridge=True", f"++{MODEL}.lora.rank=8"),
            "vanilla_mbridge=True with LoRA rank 8: mbridge has no LoRA",
        ),
        ((f"+{ARGUMENTS}.torchao_config=int8wo",), f"{ARGUMENTS}.torchao_config='int8wo': "),
        ((f"+{ARGUMENTS}.hicache_storage_backend=file",), f"{ARGUMENTS}.hicache_storage_backend='file': "),
    ],
)
def test_what_stock_verl_cannot_do_either_is_refused(overrides: tuple[str, ...], shown: str, tmp_path: Path) -> None:
    assert shown in refused(checkpoint(tmp_path, "Qwen2ForCausalLM"), FP8, *overrides)


@pytest.mark.parametrize("overrides", [(f"{ROLLOUT}.disaggregation.enabled=True",), ("model_engine=veomni",), MTP])
def test_a_model_that_no_sync_gets_right_is_refused_wherever_it_would_run(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    text = refused(checkpoint(tmp_path, "Qwen3MoeForCausalLM", mlp_only_layers=[0]), *overrides)
    assert "Qwen3MoeForCausalLM with mlp_only_layers=[0] cannot be synced to SGLang" in text


@pytest.mark.parametrize(
    "arguments",
    [
        {"speculative_algorithm": "NGRAM"},
        {"speculative_algorithm": "ngram"},
        {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/a/draft"},
        {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "/a/draft"},
    ],
)
def test_drafts_that_are_not_trained_leave_the_run_ours(arguments: dict[str, str], tmp_path: Path) -> None:
    given = [f"+{ARGUMENTS}.{key}={value}" for key, value in arguments.items()]
    rollout = rollout_of(checkpoint(tmp_path, "Qwen2ForCausalLM"), *given)
    assert rollout.custom.sync.enabled is True
    refuse_keys(rollout)


# Strategies without a sharding manager


@pytest.mark.parametrize("engine", ["veomni", "torchtitan", "fsdp_turbo", "automodel"])
def test_other_strategies_run_on_stock_verl(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    choice = f"model_engine={engine}" if engine in ("veomni", "torchtitan") else f"{STRATEGY}={engine}"
    rollout = rollout_of(choice)
    assert rollout._target_ == VERLS and rollout.custom == OFF
    said = line_of(capsys)
    assert f"{STRATEGY}={engine}" in said and "stock verl moves the weights" in said
    assert "fsdp, fsdp2, megatron" in said and "register_sharding_manager" in said


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        *((key, key) for key in (f"{SHORT_BUCKET_KEY}=64", f"{KEY_PREFIX}.enabled=True", "+sync=colocated")),
        (f"+{MODEL}.lora.peft.use_rslora=True", f"{MODEL}.lora.peft"),
    ],
)
def test_asked_for_with_such_a_strategy_it_is_refused(asked: str, shown: str) -> None:
    text = refused("model_engine=veomni", asked)
    assert f"{STRATEGY}=veomni" in text and f"so {shown}" in text and "Remove that key, and stock verl moves" in text


def test_with_such_a_strategy_our_backend_is_refused_for_another() -> None:
    backend = f"{ROLLOUT}.checkpoint_engine.backend=sync_plugin"
    text = refused("model_engine=veomni", backend)
    assert f"{STRATEGY}=veomni" in text and f"so {backend} cannot be followed. Use another, such as nccl." in text


def test_a_registered_manager_makes_its_strategy_ours() -> None:
    class Mine(ShardingManager):
        pass

    register_sharding_manager(trainer="veomni", rollout="sglang")(Mine)
    try:
        assert rollout_of("model_engine=veomni", f"{SHORT_BUCKET_KEY}=64").custom.sync.enabled is True
    finally:
        del _managers["veomni", "sglang"]


# Models


DENSE = {"mlp_only_layers": [0]}


@pytest.mark.parametrize(
    ("said", "config"),
    [
        ("Llama4ForCausalLM cannot", {}),
        ("Qwen2MoeForCausalLM with mlp_only_layers=[0] cannot", DENSE),
        ("Qwen3MoeForCausalLM with decoder_sparse_step=2 cannot", {"decoder_sparse_step": 2}),
        ("Qwen3VLMoeForConditionalGeneration with mlp_only_layers=[0] cannot", {"text_config": DENSE}),
        ("GptOssForCausalLM with mxfp4 cannot", {"quantization_config": {"quant_method": "mxfp4"}}),
    ],
)
@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_a_model_is_refused_with_key_reason_and_remedy(
    said: str, config: dict[str, Any], strategy: str, tmp_path: Path
) -> None:
    engine = ("model_engine=megatron",) if strategy == "megatron" else ()
    path = checkpoint(tmp_path, said.partition(" ")[0], **config)
    text = refused(*engine, path)
    assert f"{path}: {said} be synced to SGLang: " in text and TURN_OFF in text


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [], "decoder_sparse_step": 1}),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": None}),
        ("Qwen2ForCausalLM", DENSE),
        ("MixtralForCausalLM", {"quantization_config": None}),
    ],
)
def test_what_is_plain_is_served(architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    assert rollout_of(checkpoint(tmp_path, architecture, **config)).custom.sync.enabled is True


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}"])
def test_what_cannot_be_read_is_left_to_the_first_sync(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert rollout_of(f"{MODEL}.path={tmp_path}").custom.sync.enabled is True


def test_a_worker_refuses_what_the_driver_could_not_read() -> None:
    model = SimpleNamespace(path="org/name", hf_config=Llama4TextConfig(architectures=["Llama4ForCausalLM"]))
    adapter: Any = SimpleNamespace(model_config=model, rollout=SyncServerAdapter.rollout)
    with pytest.raises(ValueError, match=r"model\.path=org/name: Llama4ForCausalLM cannot be synced to SGLang"):
        SyncServerAdapter._refuse_family(adapter)


def test_what_verl_moves_by_itself_is_not_refused_for_its_model(tmp_path: Path) -> None:
    """Another checkpoint engine than ``naive`` has nothing of ours, so a quantized checkpoint is verl's affair."""
    path = checkpoint(tmp_path, "LlamaForCausalLM", quantization_config={"bits": 4})
    assert "its checkpoint is quantized" in refused(path)
    assert rollout_of(path, f"{ROLLOUT}.checkpoint_engine.backend=nccl").name == "sglang"


@pytest.mark.parametrize(
    ("trainers", "engines"),
    [("num_hidden_layers=3", 0), ("model_config.num_hidden_layers=1", 0), ("", 1), ("num_hidden_layers=3", 3), ("", 0)],
)
def test_other_layers_in_trainer_and_engine_are_refused(trainers: str, engines: int, tmp_path: Path) -> None:
    given = [checkpoint(tmp_path, "Qwen2ForCausalLM", num_hidden_layers=2)]
    given += [f"+{MODEL}.override_config.{trainers}"] * bool(trainers)
    given += [f"+{ARGUMENTS}.json_model_override_args='{{\"num_hidden_layers\": {engines}}}'"] * bool(engines)
    numbers = int(trainers[-1:] or 2), engines or 2
    if numbers[0] == numbers[1]:
        config_of(*given)
    else:
        said = "the trainer's model has {} layers (num_hidden_layers), SGLang's {}. Change both".format(*numbers)
        assert said in refused(*given)
