# SPDX-License-Identifier: Apache-2.0
"""What the driver refuses, in real runs of Hydra; what it hands on: ``test_driver_settles.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydra_run import refused, rollout_of
from verl_sync_plugin.config.settings import KEY_PREFIX, LONG_BUCKET_KEY, SHORT_BUCKET_KEY

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
SGLANG = f"{ROLLOUT}.name=sglang"
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
ARGUMENTS = f"{ROLLOUT}.engine_kwargs.sglang"


@pytest.mark.parametrize(
    ("override", "shown", "remedy"),
    [
        (f"{ROLLOUT}.disaggregation=True", f"{ROLLOUT}.disaggregation=True: not a mapping", "disaggregation.<key>="),
        (f"{ROLLOUT}.mtp=True", f"{ROLLOUT}.mtp=True: not a mapping", "mtp.<key>="),
        (f"{ROLLOUT}.engine_kwargs=5", f"{ROLLOUT}.engine_kwargs=5: not a mapping", "engine_kwargs.<key>="),
        (f"{ARGUMENTS}=5", f"{ARGUMENTS}=5: not a mapping", "sglang.<key>="),
        (f"{ROLLOUT}.checkpoint_engine=5", f"{ROLLOUT}.checkpoint_engine=5: not a mapping", "checkpoint_engine.<key>="),
        (f"{KEY_PREFIX}.timeout_seconds=???", f"{KEY_PREFIX}.timeout_seconds=???: no value", "Give it one, or remove"),
        (f"{KEY_PREFIX}=???", f"{KEY_PREFIX}=???: no value", "Give it one, or remove"),
        (f"{ROLLOUT}.custom=???", f"{ROLLOUT}.custom=???: no value", "Give it one, or remove"),
        (f"{SHORT_BUCKET_KEY}=???", f"{SHORT_BUCKET_KEY}=???: no value", "Give it one, or remove"),
        (f"{LONG_BUCKET_KEY}=???", f"{LONG_BUCKET_KEY}=???: no value", "Give it one, or remove"),
        (f"{KEY_PREFIX}.timeout_seconds=86401", f"{KEY_PREFIX}.timeout_seconds=86401: Expected", "Use"),
        *[
            (f"{ROLLOUT}.multi_stage_wake_up={word}", f"{ROLLOUT}.multi_stage_wake_up={word!r}: not a boolean", "True")
            for word in ("no", "off", "yes", "on", "maybe")
        ],
        (f"{ROLLOUT}.multi_stage_wake_up=1", f"{ROLLOUT}.multi_stage_wake_up=1: not a boolean", "True or False"),
        (f"{MODEL}.lora.rank=2.5", f"{MODEL}.lora.rank=2.5: not a whole number", "for example"),
        (f"{MODEL}.lora_rank=2.5", f"{MODEL}.lora_rank=2.5: not a whole number", "for example"),
        (f"{MODEL}.lora.rank=-1", f"{MODEL}.lora.rank=-1: not a whole number", "for example"),
        (f"{MODEL}.lora.rank=many", f"{MODEL}.lora.rank='many': not a whole number", "for example"),
        (f"{MODEL}.lora.alpha=big", f"{MODEL}.lora.alpha='big': not a number", "for example"),
        (f"{MODEL}.lora_alpha=big", f"{MODEL}.lora_alpha='big': not a number", "for example"),
        (f"{MODEL}.lora.merge=no", f"{MODEL}.lora.merge='no': not a boolean", "True or False"),
        (f"{MODEL}.lora=5", f"{MODEL}.lora=5: not a mapping", "lora.<key>="),
        (f"{ROLLOUT}.dtype=bfloat17", f"{ROLLOUT}.dtype='bfloat17': not a dtype of SGLang's weights", "bfloat16"),
        (f"{ROLLOUT}.dtype=int8", f"{ROLLOUT}.dtype='int8': not a dtype of SGLang's weights", "bfloat16"),
        (f"{KEY_PREFIX}.pause=stop", f"{KEY_PREFIX}.pause='stop': ", "abort, retract, in_place"),
        (
            f"{KEY_PREFIX}.pause=retract",
            f"{KEY_PREFIX}.pause='retract' with {BACKEND}=naive: ",
            f"{BACKEND}=sync_plugin",
        ),
        (f"{KEY_PREFIX}.pause=in_place", f"{KEY_PREFIX}.pause='in_place' with ", f"{KEY_PREFIX}.pause=abort"),
        (f"{KEY_PREFIX}.canary=log", f"{KEY_PREFIX}.canary='log': gone; remove it", "max_probs_diff"),
        (f"{KEY_PREFIX}.max_probs_diff=2", f"{KEY_PREFIX}.max_probs_diff=2: Expected", "Use for example"),
        (f"{ROLLOUT}.data_parallel_size=2", f"{ROLLOUT}.data_parallel_size=2: ", "+" + ARGUMENTS),
        (f"+{ARGUMENTS}.dp_size=2", f"{ARGUMENTS}.dp_size=2: ", f"{ROLLOUT}.data_parallel_size"),
        (f"+{ARGUMENTS}.tp_size=4", f"{ARGUMENTS}.tp_size=4: ", f"{ROLLOUT}.tensor_model_parallel_size"),
        (f"+{ARGUMENTS}.dtype=float16", f"{ARGUMENTS}.dtype='float16': ", f"{ROLLOUT}.dtype"),
        (
            "+" + ARGUMENTS + ".json_model_override_args='{\"quantization_config\":{}}'",
            f"{ARGUMENTS}.json_model_override_args=",
            "without",
        ),
        (f"+{ARGUMENTS}.hicache_storage_backend=file", f"{ARGUMENTS}.hicache_storage_backend='file': ", "Remove it"),
        (f"+{ARGUMENTS}.enable_lmcache=True", f"{ARGUMENTS}.enable_lmcache=True: ", "Remove it"),
        (f"{ROLLOUT}.load_format=flash_rl", f"{ROLLOUT}.load_format='flash_rl': ", "enabled=False"),
        (f"+{ARGUMENTS}.load_format=auto", f"{ARGUMENTS}.load_format='auto': ", f"{ROLLOUT}.load_format"),
        (f"+{ARGUMENTS}.ep_size=4", f"{ARGUMENTS}.ep_size=4: ", f"{ROLLOUT}.expert_parallel_size"),
        (f"+{ARGUMENTS}.model_path=/m", f"{ARGUMENTS}.model_path='/m': ", "Remove it, and set " + MODEL),
        (f"+{ARGUMENTS}.nnodes=2", f"{ARGUMENTS}.nnodes=2: ", "Remove it"),
        (f"+{ARGUMENTS}.weight_cache_mode=client", f"{ARGUMENTS}.weight_cache_mode='client': ", "Remove it"),
        (f"+{ARGUMENTS}.elastic_ep_backend=mooncake", f"{ARGUMENTS}.elastic_ep_backend='mooncake': ", "Remove it"),
        (
            f"+{ARGUMENTS}.enable_elastic_expert_backup=True",
            f"{ARGUMENTS}.enable_elastic_expert_backup=True",
            "Remove it",
        ),
        (f"+{ARGUMENTS}.encoder_only=True", f"{ARGUMENTS}.encoder_only=True: ", "Remove it"),
        (f"+{ARGUMENTS}.language_only=True", f"{ARGUMENTS}.language_only=True: ", "Remove it"),
        *[
            (f"+{ARGUMENTS}.{key}={value}", f"{ARGUMENTS}.{key}={shown}: weight sync cannot serve it", "enabled=False")
            for key, value, shown in [
                ("torchao_config", "int8wo", "'int8wo'"),
                ("modelopt_quant", "fp8", "'fp8'"),
                ("quantize_and_serve", "True", "True"),
                ("quantization", "fp8", "'fp8'"),
                ("rl_quant_profile", "/p", "'/p'"),
                ("pp_size", "2", "2"),
                ("cpu_offload_gb", "4", "4"),
                ("offload_group_size", "2", "2"),
                ("kt_weight_path", "/w", "'/w'"),
                ("disaggregation_mode", "prefill", "'prefill'"),
                ("moe_runner_backend", "flashinfer_trtllm", "'flashinfer_trtllm'"),
                ("load_format", "bitsandbytes", "'bitsandbytes'"),
            ]
        ],
    ],
)
def test_refused_by_name(tmp_path: Path, override: str, shown: str, remedy: str) -> None:
    text = refused(tmp_path, override)
    assert shown in text
    assert remedy in text.partition(shown)[2], text


def test_where_verl_compares_no_probabilities_nothing_can_be_guarded(tmp_path: Path) -> None:
    guard = f"{KEY_PREFIX}.max_probs_diff=0.02"
    assert rollout_of(tmp_path, guard).custom.sync.max_probs_diff == 0.02
    for override, shown in (
        (f"{ROLLOUT}.calculate_log_probs=False", f"{guard} with {ROLLOUT}.calculate_log_probs=False"),
        ("algorithm.rollout_correction.bypass_mode=True", "bypass_mode=True"),
        ("trainer.use_v1=False", "without one of verl's V1 trainers"),
    ):
        text = refused(tmp_path, guard, override)
        assert shown in text and f"or remove {KEY_PREFIX}.max_probs_diff" in text


def test_an_error_that_nobody_foresaw_ends_the_driver(tmp_path: Path) -> None:
    """Here omegaconf's, of an interpolation; Hydra would make a warning of it and go on without any check."""
    text = refused(tmp_path, f"{KEY_PREFIX}.timeout_seconds=${{nobody.knows}}")
    assert "InterpolationKeyError" in text and "nobody.knows" in text and f"{KEY_PREFIX}.timeout_seconds" in text
    assert "VERL_USE_EXTERNAL_PLUGINS=none" in text


def test_any_exception_ends_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_sync_plugin.hooks import driver

    def broken(*_: Any) -> None:
        raise AttributeError("nobody\nforesaw this")

    monkeypatch.setattr(driver, "check_rollout", broken)
    assert "cannot check the keys of this run: AttributeError: nobody foresaw this. Correct" in refused(tmp_path)


def test_what_serves_is_not_refused(tmp_path: Path) -> None:
    rollout = rollout_of(
        tmp_path,
        f"{KEY_PREFIX}.timeout_seconds=86400",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        f"{ROLLOUT}.data_parallel_size=2",
        f"{ROLLOUT}.dtype=half",
        f"{ROLLOUT}.expert_parallel_size=4",
        f"{MODEL}.lora.alpha=32.0",
        f"{ROLLOUT}.multi_stage_wake_up=False",
        *(
            f"+{ARGUMENTS}.{key}={value}"
            for key, value in {
                "dp_size": 2, "tp_size": 4, "enable_dp_attention": True, "torchao_config": "''", "cpu_offload_gb": 0,
                "pp_size": 1, "quantization": "null", "kv_cache_dtype": "fp8_e5m2", "ep_size": 4, "dtype": "float16",
                "load_format": "dummy", "weight_cache_mode": "off",
                "moe_runner_backend": "triton", "disaggregation_mode": "'null'",
            }.items()
        ),
    )  # fmt: skip
    assert rollout.multi_stage_wake_up is False and rollout.custom.sync.timeout_seconds == 86400


def test_sglang_may_share_out_its_ranks_for_attention(tmp_path: Path) -> None:
    """DP attention leaves the number of ranks what it is; refused without it, and where it does not divide them."""
    ranks, attention = f"{ROLLOUT}.tensor_model_parallel_size=4", f"+{ARGUMENTS}.enable_dp_attention=True"
    assert rollout_of(tmp_path, ranks, attention, f"+{ARGUMENTS}.dp_size=2").engine_kwargs.sglang.dp_size == 2
    assert "dp_size=3: " in refused(tmp_path, ranks, attention, f"+{ARGUMENTS}.dp_size=3")
    assert "enable_dp_attention=True" in refused(tmp_path, ranks, f"+{ARGUMENTS}.dp_size=2")
