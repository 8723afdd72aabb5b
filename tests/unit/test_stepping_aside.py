# SPDX-License-Identifier: Apache-2.0
"""Covers models that no sync gets right, and runs that stock verl takes over with one line, or that are refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Llama4TextConfig

from hydra_run import config_of, refused, rollout_of
from verl_sync_plugin.config.settings import KEY_PREFIX, SHORT_BUCKET_KEY, TURN_OFF
from verl_sync_plugin.rollouts import rollout_of as engine_of
from verl_sync_plugin.rollouts.sglang.adapter import SyncServerAdapter

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
STRATEGY = "actor_rollout_ref.actor.strategy"
MEGATRON = "actor_rollout_ref.actor.megatron"
ARGUMENTS = f"{ROLLOUT}.engine_kwargs.sglang"
FP8 = f"{ROLLOUT}.quantization=fp8"
MTP = (f"{MODEL}.mtp.enable=True", f"{MODEL}.mtp.enable_rollout=True")
ON_MEGATRON, VEOMNI = "model_engine=megatron", "model_engine=veomni"
SHORT, ON, COMPOSED = f"{SHORT_BUCKET_KEY}=64", f"{KEY_PREFIX}.enabled=True", "+sync=colocated"
OURS = f"{ROLLOUT}.checkpoint_engine.backend=sync_plugin"
DENSE = {"mlp_only_layers": [0]}
QWEN2, QWEN3_MOE = "Qwen2ForCausalLM", "Qwen3MoeForCausalLM"
Given = tuple[str, ...]


def checkpoint(folder: Path, architecture: str, **config: Any) -> str:
    """The override that names a model of this architecture."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    return f"{MODEL}.path={model}"


CASES: list[tuple[Given, str]] = [
    (MTP, f"{ROLLOUT}.mtp.enable_rollout=True: weight sync has no draft model"),
    ((f"{ROLLOUT}.disaggregation.enabled=True",), f"{ROLLOUT}.disaggregation.enabled=True: weight sync serves one"),
    ((ON_MEGATRON, f"{MEGATRON}.use_megatron_fsdp=True"), f"{MEGATRON}.use_megatron_fsdp=True: "),
    ((ON_MEGATRON, f"{MEGATRON}.vanilla_mbridge=True"), f"{MEGATRON}.vanilla_mbridge=True: weight sync serves"),
    ((f"+{ARGUMENTS}.speculative_algorithm=NEXTN",), f"{ARGUMENTS}.speculative_algorithm='NEXTN' without "),
    ((f"{ROLLOUT}.dtype=auto",), f"{ROLLOUT}.dtype='auto': "),
    ((f"{ROLLOUT}.dtype=auto", f"{ROLLOUT}.checkpoint_engine.backend=nccl"), f"{ROLLOUT}.dtype='auto': "),
    ((f"{ROLLOUT}.load_format=flash_rl",), f"{ROLLOUT}.load_format='flash_rl': SGLang quantizes"),
    *(((f"+{ARGUMENTS}.{key}=4",), f"{ARGUMENTS}.{key}=4: ") for key in ("cpu_offload_gb", "offload_group_size")),
    *(((f"+{ARGUMENTS}.{key}={value}",), f"{ARGUMENTS}.{key}={value!r}: weight sync goes by {ROLLOUT}.{key}=")
      for key, value in (("dtype", "float16"), ("load_format", "auto"))),
]  # fmt: skip
STRATEGIES = {"veomni": VEOMNI, "torchtitan": "model_engine=torchtitan"}
STRATEGIES |= {each: f"{STRATEGY}={each}" for each in ("fsdp_turbo", "automodel")}
IN_FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


@pytest.mark.parametrize(("overrides", "said"), [
    *((overrides, (cause,)) for overrides, cause in CASES),
    *(((choice,), (f"{STRATEGY}={name}", "fsdp, fsdp2, megatron", "register_sharding_manager"))
      for name, choice in STRATEGIES.items()),
])  # fmt: skip
def test_stock_verl_moves_the_weights_and_one_line_says_so(
    overrides: Given, said: Given, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout = rollout_of(checkpoint(tmp_path, QWEN2), *overrides)
    assert rollout._target_ == "verl.workers.config.RolloutConfig" and rollout.custom == {"sync": {"enabled": False}}
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "[verl-sync-plugin]" in line]
    assert "weight sync NOT IN USE, stock verl moves the weights. " in line and all(each in line for each in said)


@pytest.mark.parametrize(("architecture", "config", "overrides", "said"), [
    # where a key of the plugin asks for it
    *((QWEN2, {}, (*overrides, SHORT), (cause, f"so {SHORT} cannot be followed. Remove that key", TURN_OFF))
      for overrides, cause in CASES),
    *((QWEN2, {}, (VEOMNI, asked), (f"{STRATEGY}=veomni", f"so {asked}", "Remove that key, and stock verl moves"))
      for asked in (SHORT, ON, COMPOSED, f"{KEY_PREFIX}.verify=always")),
    (QWEN2, {}, (VEOMNI, OURS), (f"{STRATEGY}=veomni", f"so {OURS} cannot be followed. Use another, such as nccl.")),
    (QWEN2, {}, (*MTP, f"{MODEL}.lora.rank=8"),  # it would train all parameters where an adapter is asked for
     (f"{MODEL}.lora.rank=8 with stock verl's trainer: verl's own", f"{MODEL}.lora_rank=8")),
    *((QWEN2, {}, (FP8, *overrides), (shown,)) for shown, *overrides in (
        (f"quantization='fp8' with {MODEL}.lora.merge=False and LoRA rank 8: ", f"{MODEL}.lora_rank=8"),
        (f"{ARGUMENTS}.speculative_draft_model_path='/d' with {ROLLOUT}.quantization='fp8': SGLang would read",
         *(f"+{ARGUMENTS}.speculative_{key}" for key in ("algorithm=EAGLE3", "draft_model_path=/d"))),
        ("quantization='int8': verl quantizes for SGLang to fp8 alone", f"{ROLLOUT}.quantization=int8"),
        (f"{ARGUMENTS}.json_model_override_args=", f"+{ARGUMENTS}.json_model_override_args='{{}}'"),
        ("vanilla_mbridge=True with LoRA rank 8: mbridge has no LoRA",
         ON_MEGATRON, f"{MEGATRON}.vanilla_mbridge=True", f"++{MODEL}.lora.rank=8"),
        (f"{ARGUMENTS}.torchao_config='int8wo': ", f"+{ARGUMENTS}.torchao_config=int8wo"))),
    # models that no sync gets right
    *((name, config, engine, (f"{MODEL}.path=", f"{name}{reason} cannot be synced to SGLang: ", TURN_OFF))
      for engine in ((), (ON_MEGATRON,)) for name, reason, config in (
          ("Llama4ForCausalLM", "", {}), ("Qwen2MoeForCausalLM", " with mlp_only_layers=[0]", DENSE),
          (QWEN3_MOE, " with decoder_sparse_step=2", {"decoder_sparse_step": 2}),
          ("Qwen3VLMoeForConditionalGeneration", " with mlp_only_layers=[0]", {"text_config": DENSE}),
          ("GptOssForCausalLM", " with mxfp4", {"quantization_config": {"quant_method": "mxfp4"}}))),
    *(("LlamaForCausalLM", {f"{key}_config": {"bits": 4}}, (), ("its checkpoint is quantized",))
      for key in ("quantization", "compression")),
    (QWEN2, {}, (f"+{ARGUMENTS}.json_model_override_args='{{\"architectures\": [\"Llama4ForCausalLM\"]}}'",),
     ("Llama4ForCausalLM cannot be synced to SGLang",)),
])  # fmt: skip
def test_refused(architecture: str, config: dict[str, Any], overrides: Given, said: Given, tmp_path: Path) -> None:
    text = refused(checkpoint(tmp_path, architecture, **config), *overrides)
    assert all(each in text for each in said), text


@pytest.mark.parametrize(("architecture", "config", "arguments"), [
    (QWEN3_MOE, {"mlp_only_layers": [], "decoder_sparse_step": 1}, {}), (QWEN3_MOE, {"mlp_only_layers": None}, {}),
    (QWEN2, DENSE, {}), ("MixtralForCausalLM", {"quantization_config": None}, {}),
    ("DeepseekV3ForCausalLM", IN_FP8, {}),
    # drafts that are not trained
    *((QWEN2, {}, {"speculative_algorithm": name}) for name in ("NGRAM", "ngram")),
    *((QWEN2, {}, {"speculative_algorithm": name, "speculative_draft_model_path": "/a/draft"})
      for name in ("EAGLE3", "STANDALONE")),
])  # fmt: skip
def test_plain_is_served(architecture: str, config: dict[str, Any], arguments: dict[str, str], tmp_path: Path) -> None:
    given = [f"+{ARGUMENTS}.{key}={value}" for key, value in arguments.items()]
    given += [FP8] if config == IN_FP8 else []  # verl's fp8 takes the place of the checkpoint's own
    rollout = rollout_of(checkpoint(tmp_path, architecture, **config), *given)
    assert rollout.custom.sync.enabled is True
    engine_of("sglang").refuse_keys(rollout)


def test_what_cannot_be_read_is_left_to_the_first_sync(tmp_path: Path) -> None:
    for content in (None, "", "{", "[]", "{}"):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        assert rollout_of(f"{MODEL}.path={tmp_path}").custom.sync.enabled is True


@pytest.mark.parametrize(
    ("what", "value", "said"), [("DEVICE", "npu", "npu of nvidia"), ("VENDOR", "amd", "cuda of amd")]
)
def test_a_device_without_our_engines(what: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"VERL_ENGINE_{what}", value)
    assert rollout_of().custom.sync.enabled is False
    assert f"{STRATEGY}=fsdp on {said}: weight sync needs nvidia" in refused(SHORT)


def test_a_worker_refuses_what_the_driver_could_not_read() -> None:
    model = SimpleNamespace(path="org/name", hf_config=Llama4TextConfig(architectures=["Llama4ForCausalLM"]))
    adapter: Any = SimpleNamespace(model_config=model, rollout=SyncServerAdapter.rollout, config={})
    with pytest.raises(ValueError, match=r"model\.path=org/name: Llama4ForCausalLM cannot be synced to SGLang"):
        SyncServerAdapter._make_endpoint(adapter, False, (), "")


def test_what_verl_moves_by_itself_is_not_refused_for_its_model(tmp_path: Path) -> None:
    """Another checkpoint engine than ``naive`` has nothing of ours, so a quantized checkpoint is verl's affair."""
    path = checkpoint(tmp_path, "LlamaForCausalLM", quantization_config={"bits": 4})
    for backend in ("nccl", "async_plugin", "nccl_plugin"):  # the last two are somebody else's
        legacy = "trainer.use_v1=False"  # a V1 trainer does not ask it where engines share its GPUs
        assert rollout_of(path, legacy, f"{ROLLOUT}.checkpoint_engine.backend={backend}").name == "sglang"


@pytest.mark.parametrize(
    ("trainers", "engines"),
    [("num_hidden_layers=3", 0), ("model_config.num_hidden_layers=1", 0), ("", 1), ("num_hidden_layers=3", 3), ("", 0),
     ("num_layers=1", 0), ("num_layers=1", 1)],  # Megatron's
)  # fmt: skip
def test_other_layers_in_trainer_and_engine_are_refused(trainers: str, engines: int, tmp_path: Path) -> None:
    given = [checkpoint(tmp_path, QWEN2, num_hidden_layers=2)]
    megatron = (ON_MEGATRON, f"+{MODEL}.override_config.num_hidden_layers=7")  # which its trainer does not read
    given += megatron if "num_layers" in trainers else ()
    key = f"{MEGATRON}.override_transformer_config" if "num_layers" in trainers else f"{MODEL}.override_config"
    given += [f"+{key}.{trainers}"] * bool(trainers)
    given += [f"+{ARGUMENTS}.json_model_override_args='{{\"num_hidden_layers\": {engines}}}'"] * bool(engines)
    numbers = int(trainers[-1:] or 2), engines or 2
    if numbers[0] == numbers[1]:
        config_of(*given)
    else:
        said = "the trainer's model has {} layers (num_hidden_layers), SGLang's {}. Change both".format(*numbers)
        assert said in refused(*given)
