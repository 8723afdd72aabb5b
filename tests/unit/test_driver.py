# SPDX-License-Identifier: Apache-2.0
"""What the driver refuses, and what it hands on, in real runs of Hydra up to verl's main function."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

import hydra_run
import unmeasured
from verl_sync_plugin.bucket_size import DEFAULT_MEGABYTES, LONG_BUCKET_KEY, SHORT_BUCKET_KEY
from verl_sync_plugin.config import KEY_PREFIX

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
STRATEGY = "actor_rollout_ref.actor.strategy"
SGLANG = f"{ROLLOUT}.name=sglang"
ARGUMENTS = f"{ROLLOUT}.engine_kwargs.sglang"
STOCK = OmegaConf.load(hydra_run.CONFIG_DIR / "rollout" / "rollout.yaml")
STOCK_MEGABYTES = STOCK.checkpoint_engine.update_weights_bucket_megabytes


def rollout_of(folder: Path, *overrides: str, **choice: Any) -> DictConfig:
    rollout: DictConfig = hydra_run.run(folder, SGLANG, *overrides, **choice).actor_rollout_ref.rollout
    return rollout


def raw(rollout: DictConfig, key: str) -> Any:
    """A value as it leaves the driver: not resolved."""
    value: Any = OmegaConf.to_container(rollout, resolve=False)
    for part in key.removeprefix(f"{ROLLOUT}.").split("."):
        value = value[part]
    return value


def refused(folder: Path, *overrides: str) -> str:
    """The one line with which a run ends in the driver."""
    with pytest.raises(SystemExit) as ended:
        rollout_of(folder, *overrides)
    text = str(ended.value)
    assert text.startswith("verl-sync-plugin: ") and "\n" not in text, text
    return text


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
        (f"{KEY_PREFIX}.timeout_seconds=86401", f"{KEY_PREFIX}.timeout_seconds=86401: more than a day", "Use"),
        (f"{KEY_PREFIX}.timeout_seconds=720000", f"{KEY_PREFIX}.timeout_seconds=720000: more than a day", "Use"),
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
        (f"{ROLLOUT}.dtype=auto", f"{ROLLOUT}.dtype='auto': says not what travels", f"{KEY_PREFIX}.wire_dtype"),
        (f"{ROLLOUT}.data_parallel_size=2", f"{ROLLOUT}.data_parallel_size=2: ", "+" + ARGUMENTS),
        (f"+{ARGUMENTS}.dp_size=2", f"{ARGUMENTS}.dp_size=2: ", f"{ROLLOUT}.data_parallel_size"),
        (f"+{ARGUMENTS}.tp_size=4", f"{ARGUMENTS}.tp_size=4: ", f"{ROLLOUT}.tensor_model_parallel_size"),
        (f"+{ARGUMENTS}.dtype=float16", f"{ARGUMENTS}.dtype='float16': ", f"{ROLLOUT}.dtype"),
        (
            "+" + ARGUMENTS + ".json_model_override_args='{\"quantization_config\":{}}'",
            f"{ARGUMENTS}.json_model_override_args=",
            "without",
        ),
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
                ("speculative_algorithm", "EAGLE", "'EAGLE'"),
                ("load_format", "bitsandbytes", "'bitsandbytes'"),
            ]
        ],
    ],
)
def test_refused_by_name(tmp_path: Path, override: str, shown: str, remedy: str) -> None:
    text = refused(tmp_path, override)
    assert shown in text
    assert remedy in text.partition(shown)[2], text


def test_an_error_that_nobody_foresaw_ends_the_driver(tmp_path: Path) -> None:
    """Here omegaconf's, of an interpolation; Hydra would make a warning of it and go on without any check."""
    text = refused(tmp_path, f"{KEY_PREFIX}.timeout_seconds=${{nobody.knows}}")
    assert "InterpolationKeyError" in text and "nobody.knows" in text and f"{KEY_PREFIX}.timeout_seconds" in text
    assert "VERL_USE_EXTERNAL_PLUGINS=none" in text


def test_any_exception_ends_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_sync_plugin import driver

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
        f"{MODEL}.lora.alpha=32.0",
        f"{ROLLOUT}.multi_stage_wake_up=False",
        *(
            f"+{ARGUMENTS}.{key}={value}"
            for key, value in {
                "dp_size": 2, "tp_size": 4, "enable_dp_attention": True, "torchao_config": "''", "cpu_offload_gb": 0,
                "pp_size": 1, "quantization": "null", "kv_cache_dtype": "fp8_e5m2", "ep_size": 4, "dtype": "float16",
                "moe_runner_backend": "triton", "disaggregation_mode": "'null'",
            }.items()
        ),
    )  # fmt: skip
    assert rollout.multi_stage_wake_up is False and rollout.custom.sync.timeout_seconds == 86400


@pytest.mark.parametrize(
    ("overrides", "short", "long"),
    [
        ((), DEFAULT_MEGABYTES, DEFAULT_MEGABYTES),
        ((f"{SHORT_BUCKET_KEY}=64",), 64, 64),
        ((f"{SHORT_BUCKET_KEY}=auto",), "auto", DEFAULT_MEGABYTES),
        ((f"{LONG_BUCKET_KEY}=256",), 256, 256),
        ((f"{LONG_BUCKET_KEY}={STOCK_MEGABYTES}",), STOCK_MEGABYTES, STOCK_MEGABYTES),
        ((f"{LONG_BUCKET_KEY}=64", f"{SHORT_BUCKET_KEY}=64"), 64, 64),
    ],
)
def test_both_bucket_keys_leave_as_numbers(tmp_path: Path, overrides: tuple[str, ...], short: Any, long: int) -> None:
    rollout = rollout_of(tmp_path, *overrides)
    assert (raw(rollout, SHORT_BUCKET_KEY), raw(rollout, LONG_BUCKET_KEY)) == (short, long)
    assert raw(rollout, "multi_stage_wake_up") is True


def test_verls_default_given_by_hand_counts_as_given(tmp_path: Path) -> None:
    text = refused(tmp_path, f"{SHORT_BUCKET_KEY}=512", f"{LONG_BUCKET_KEY}={STOCK_MEGABYTES}")
    assert "are both given and differ" in text


@pytest.mark.parametrize("overrides", [(), (f"{KEY_PREFIX}.enabled=False",), (f"{SHORT_BUCKET_KEY}=64",)])
def test_a_process_without_the_plugin_can_read_it(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """As verl's legacy task runner, which resolves the config before anything imports the plugin."""
    config = hydra_run.run(tmp_path, SGLANG, *overrides)
    file = tmp_path / "config.yaml"
    file.write_text(OmegaConf.to_yaml(config, resolve=False))
    code = (
        "import sys; from omegaconf import OmegaConf; config = OmegaConf.load(sys.argv[1]); OmegaConf.resolve(config);"
        f"print(config.{LONG_BUCKET_KEY}); assert 'verl_sync_plugin' not in sys.modules"
    )
    environment = {**unmeasured.environment(), "VERL_PLATFORM": ""}  # the CPU stack would load a part of the plugin
    command = [sys.executable, "-c", code, str(file)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [
        str(config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes)
    ]


def as_stock(rollout: DictConfig, sync: Any = None) -> None:
    """The rollout config is verl's own, but for a mark that the plugin is off where its classes look for it."""
    found: Any = OmegaConf.to_container(rollout, resolve=False)
    stock: Any = OmegaConf.to_container(STOCK, resolve=False)
    assert found.pop("custom", None) == sync
    assert {**found, "name": None} == {**stock, "name": None}


OFF = {"sync": {"enabled": False}}


def test_switched_off_it_is_verls_own_config(tmp_path: Path) -> None:
    as_stock(rollout_of(tmp_path, f"{KEY_PREFIX}.enabled=False"), OFF)


def test_another_rollout_has_verls_own_config(tmp_path: Path) -> None:
    as_stock(hydra_run.run(tmp_path, f"{ROLLOUT}.name=vllm").actor_rollout_ref.rollout)


def test_disaggregated_it_is_verls_own_config(tmp_path: Path) -> None:
    as_stock(rollout_of(tmp_path, "actor_rollout_ref.hybrid_engine=False"), OFF)


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_the_short_key_is_heard_where_verl_moves_the_weights(tmp_path: Path, name: str) -> None:
    off = [f"{KEY_PREFIX}.enabled=False"] if name == "sglang" else []
    config = hydra_run.run(tmp_path, f"{ROLLOUT}.name={name}", f"{SHORT_BUCKET_KEY}=64", *off)
    assert config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes == 64


@pytest.mark.parametrize("engine", ["veomni", "torchtitan", "fsdp_turbo", "automodel"])
def test_other_strategies_run_on_stock_verl(tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    choice = f"model_engine={engine}" if engine in ("veomni", "torchtitan") else f"{STRATEGY}={engine}"
    as_stock(rollout_of(tmp_path, choice), OFF)
    said = [line for line in capsys.readouterr().out.splitlines() if "[verl-sync-plugin]" in line]
    assert len(said) == 1, said
    assert f"{STRATEGY}={engine}" in said[0] and "stock verl moves the weights" in said[0]
    assert "fsdp, fsdp2, megatron" in said[0] and "register_sharding_manager" in said[0]


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (f"{SHORT_BUCKET_KEY}=64", f"{SHORT_BUCKET_KEY}=64"),
        (f"{KEY_PREFIX}.enabled=True", f"{KEY_PREFIX}.enabled=True"),
        (f"{KEY_PREFIX}.check_finite=False", f"{KEY_PREFIX}.check_finite=False"),
        ("+sync=colocated", SHORT_BUCKET_KEY),
        (f"+{MODEL}.lora.peft.use_rslora=True", f"{MODEL}.lora.peft"),
    ],
)
def test_asked_for_with_such_a_strategy_it_is_refused(tmp_path: Path, asked: str, shown: str) -> None:
    text = refused(tmp_path, "model_engine=veomni", asked)
    assert f"{STRATEGY}=veomni" in text and shown in text and "Use one of these, or remove" in text
    as_stock(rollout_of(tmp_path, "model_engine=veomni", f"{KEY_PREFIX}.enabled=False"), OFF)


def test_a_registered_manager_makes_its_strategy_ours(tmp_path: Path) -> None:
    from verl_sync_plugin.sharding_manager.base import ShardingManager
    from verl_sync_plugin.sharding_manager.registry import _managers, register_sharding_manager

    class Mine(ShardingManager):
        pass

    register_sharding_manager(trainer="veomni", rollout="sglang")(Mine)
    try:
        assert rollout_of(tmp_path, "model_engine=veomni", f"{SHORT_BUCKET_KEY}=64").custom.sync.enabled is True
    finally:
        del _managers["veomni", "sglang"]


def test_generation_syncs_nothing_and_may_quantize(tmp_path: Path) -> None:
    found = rollout_of(tmp_path, f"+{ARGUMENTS}.torchao_config=int8wo", program="main_generation_server")
    assert found._target_ == STOCK._target_ and found.custom.sync.enabled is False


def test_every_job_of_a_multirun_is_checked(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="timeout_seconds=-1"):
        hydra_run.multirun(tmp_path, SGLANG, f"{KEY_PREFIX}.timeout_seconds=5,-1")
    first, second = hydra_run.multirun(tmp_path, SGLANG, f"{SHORT_BUCKET_KEY}=64,128")
    assert first.actor_rollout_ref.rollout.update_weights_bucket_megabytes == 64
    assert second.actor_rollout_ref.rollout.update_weights_bucket_megabytes == 128


def test_a_multirun_without_a_trainer_that_settles_is_told_what_to_set(tmp_path: Path) -> None:
    """Hydra has copied the config when a job of a multirun is announced; V1's trainers settle it themselves."""
    lora = (SGLANG, f"{MODEL}.lora.rank=8", f"{MODEL}.lora.merge=True")
    assert len(hydra_run.multirun(tmp_path, *lora, "data.seed=1,2")) == 2
    with pytest.raises(SystemExit, match=r"--multirun.*actor_rollout_ref\.model\.lora_rank=8"):
        hydra_run.multirun(tmp_path, *lora, "trainer.use_v1=False")
    with pytest.raises(SystemExit, match=r"--multirun.*custom\.sync\.enabled=False"):
        hydra_run.multirun(tmp_path, SGLANG, "model_engine=veomni", "trainer.use_v1=False")
