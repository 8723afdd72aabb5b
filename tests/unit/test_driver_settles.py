# SPDX-License-Identifier: Apache-2.0
"""What the driver hands on, in real runs of Hydra up to verl's main function: plain values, verl's own where it can."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

import hydra_run
import unmeasured
from hydra_run import refused, rollout_of
from verl_sync_plugin.config.settings import DEFAULT_MEGABYTES, KEY_PREFIX, LONG_BUCKET_KEY, SHORT_BUCKET_KEY
from verl_sync_plugin.hooks.driver import settle

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
STRATEGY = "actor_rollout_ref.actor.strategy"
SGLANG = f"{ROLLOUT}.name=sglang"
ARGUMENTS = f"{ROLLOUT}.engine_kwargs.sglang"
STOCK = OmegaConf.load(hydra_run.CONFIG_DIR / "rollout" / "rollout.yaml")
STOCK_MEGABYTES = STOCK.checkpoint_engine.update_weights_bucket_megabytes


def raw(rollout: DictConfig, key: str) -> Any:
    """A value as it leaves the driver: not resolved."""
    value: Any = OmegaConf.to_container(rollout, resolve=False)
    for part in key.removeprefix(f"{ROLLOUT}.").split("."):
        value = value[part]
    return value


@pytest.mark.parametrize(
    ("overrides", "short", "long"),
    [
        ((), DEFAULT_MEGABYTES, DEFAULT_MEGABYTES),
        ((f"{SHORT_BUCKET_KEY}=64",), 64, 64),
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


def test_switched_off_it_is_verls_own_config_also_where_no_driver_was(tmp_path: Path) -> None:
    """Jobs of a multirun hold values already, and no longer what tells a default from a value that was given."""
    (config,) = hydra_run.multirun(tmp_path, SGLANG, f"{KEY_PREFIX}.enabled=False")
    OmegaConf.resolve(config)
    settle(config, resolved=True)
    rollout = config.actor_rollout_ref.rollout
    assert rollout.multi_stage_wake_up == STOCK.multi_stage_wake_up
    assert rollout.checkpoint_engine.update_weights_bucket_megabytes == STOCK_MEGABYTES
    assert OmegaConf.to_container(rollout.custom) == OFF


def test_a_comparison_with_stock_verl_that_would_train_other_parameters_is_refused(tmp_path: Path) -> None:
    rank, flat = f"{MODEL}.lora.rank=8", f"{MODEL}.lora_rank=8"
    for off in (f"{KEY_PREFIX}.enabled=False", "+sync=stock"):
        said = refused(tmp_path, rank, off)
        assert f"{rank} with custom.sync.enabled=False" in said and f"{flat} {MODEL}.lora_alpha=32" in said, said
        as_stock(rollout_of(tmp_path, rank, flat, off), OFF)
    as_stock(rollout_of(tmp_path, rank, "model_engine=megatron", f"{KEY_PREFIX}.enabled=False"), OFF)
    as_stock(rollout_of(tmp_path, rank, "actor_rollout_ref.hybrid_engine=False"), OFF)  # nobody has switched it off


def test_what_verl_moves_by_itself_is_not_refused_for_its_model(tmp_path: Path) -> None:
    """Another checkpoint engine than ``naive`` has nothing of ours, so a quantized checkpoint is verl's affair."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "quantization_config": {"bits": 4}}')
    path = f"{MODEL}.path={model}"
    assert "its checkpoint is quantized" in refused(tmp_path, path)
    assert rollout_of(tmp_path, path, f"{ROLLOUT}.checkpoint_engine.backend=nccl").name == "sglang"


def test_another_rollout_has_verls_own_config(tmp_path: Path) -> None:
    as_stock(hydra_run.run(tmp_path, f"{ROLLOUT}.name=vllm").actor_rollout_ref.rollout)


def test_disaggregated_it_is_verls_own_config(tmp_path: Path) -> None:
    as_stock(rollout_of(tmp_path, "actor_rollout_ref.hybrid_engine=False"), OFF)


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
        (f"{KEY_PREFIX}.verify=never", f"{KEY_PREFIX}.verify=never"),
        ("+sync=colocated", "+sync=colocated"),
        (f"+{MODEL}.lora.peft.use_rslora=True", f"{MODEL}.lora.peft"),
    ],
)
def test_asked_for_with_such_a_strategy_it_is_refused(tmp_path: Path, asked: str, shown: str) -> None:
    text = refused(tmp_path, "model_engine=veomni", asked)
    assert f"{STRATEGY}=veomni" in text and f"so {shown}" in text and "Remove that key, and stock verl moves" in text
    as_stock(rollout_of(tmp_path, "model_engine=veomni", f"{KEY_PREFIX}.enabled=False"), OFF)


def test_with_such_a_strategy_our_backend_is_refused_for_another(tmp_path: Path) -> None:
    backend = f"{ROLLOUT}.checkpoint_engine.backend=sync_plugin"
    text = refused(tmp_path, "model_engine=veomni", backend)
    assert f"{STRATEGY}=veomni" in text and f"so {backend} cannot be followed. Use another, such as nccl." in text


def test_a_registered_manager_makes_its_strategy_ours(tmp_path: Path) -> None:
    from verl_sync_plugin.sharding_manager import _managers, register_sharding_manager
    from verl_sync_plugin.sync.manager import ShardingManager

    class Mine(ShardingManager):
        pass

    register_sharding_manager(trainer="veomni", rollout="sglang")(Mine)
    try:
        assert rollout_of(tmp_path, "model_engine=veomni", f"{SHORT_BUCKET_KEY}=64").custom.sync.enabled is True
    finally:
        del _managers["veomni", "sglang"]


def test_a_separate_rollout_may_keep_its_requests(tmp_path: Path) -> None:
    gpus = (f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=2")
    found = rollout_of(tmp_path, "+sync=separate", *gpus, f"{KEY_PREFIX}.pause=retract")
    assert found.custom.sync.pause == "retract"
    # As in a config of verl's one_step_off, which does not read the trainer's mode
    separate = (f"{ROLLOUT}.checkpoint_engine.backend=sync_plugin", "+rollout.nnodes=1")
    assert rollout_of(tmp_path, *separate, f"{KEY_PREFIX}.pause=retract").custom.sync.pause == "retract"


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
    with pytest.raises(SystemExit, match=r"--multirun.*model\.lora\.peft=\{'use_dora': True\}"):
        hydra_run.multirun(tmp_path, *lora, f"{MODEL}.lora.type=dora", "trainer.use_v1=False")
    with pytest.raises(SystemExit, match=r"--multirun.*custom\.sync\.enabled=False"):
        hydra_run.multirun(tmp_path, SGLANG, "model_engine=veomni", "trainer.use_v1=False")
