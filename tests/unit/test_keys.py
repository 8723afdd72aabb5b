# SPDX-License-Identifier: Apache-2.0
"""Covers the keys of a run in the driver: what is refused by key, value and remedy, and what is handed on."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass

import hydra_run
from hydra_run import CONFIG_DIR, composed, config_of, refused, rollout_of
from verl_sync_plugin.config import settings
from verl_sync_plugin.config.settings import LONG_BUCKET_KEY, SHORT_BUCKET_KEY, SyncConfig, sync_config_of
from verl_sync_plugin.hooks import driver

ROLL, SYNC = "actor_rollout_ref.rollout", settings.KEY_PREFIX
MODEL, MEGATRON = "actor_rollout_ref.model", "actor_rollout_ref.actor.megatron"
SGL, CUSTOM = f"{ROLL}.engine_kwargs.sglang", f"{ROLL}.custom"
OURS = f"{ROLL}.checkpoint_engine.backend={settings.SEPARATE_BACKEND}"
GPUS = f"{ROLL}.n_gpus_per_node"
SEPARATE = ("+sync=separate", f"{ROLL}.nnodes=1", f"{GPUS}=2")
SERVED_LORA = (f"{MODEL}.lora.rank=8", f"{MODEL}.lora.merge=False")
GUARD = f"{SYNC}.max_probs_diff=0.02"
UNSERVED = {
    "torchao_config": "int8wo", "modelopt_quant": "fp8", "quantize_and_serve": True, "quantization": "fp8",
    "rl_quant_profile": "/p", "pp_size": 2, "kt_weight_path": "/w",
    "disaggregation_mode": "prefill", "moe_runner_backend": "flashinfer_trtllm", "load_format": "bitsandbytes",
}  # fmt: skip
ASYNC = ("+async_training.staleness_threshold=0.1",)  # a key of fully_async
BUCKET = (SHORT_BUCKET_KEY, LONG_BUCKET_KEY)

# Overrides, the key and value that are named, and what stands after them
REFUSED: list[tuple[str | tuple[str, ...], str, str]] = [
    # no mapping, no value
    *((f"{key}=5", f"{key}=5: not a mapping", f"{key}.<key>=") for key in (f"{ROLL}.engine_kwargs", SGL)),
    *((f"{ROLL}.{key}=True", f"{key}=True: not a mapping", f"{key}.<key>=") for key in ("disaggregation", "mtp")),
    (f"{ROLL}.checkpoint_engine=5", "checkpoint_engine=5: not a mapping", "checkpoint_engine.<key>="),
    (f"{ROLL}.checkpoint_engine=null", f"{ROLL}.checkpoint_engine=None: ", "Leave it out"),
    (f"{SYNC}.timeout_seconds=???", "MissingMandatoryValue", f"{SYNC}.timeout_seconds"),
    (f"{LONG_BUCKET_KEY}=???", f"{LONG_BUCKET_KEY}=None: not a whole number", f"{LONG_BUCKET_KEY}=512"),
    # keys of the sync
    (f"{SYNC}.timeout_second=5", f"{SYNC}.timeout_second=5: unknown", f"Did you mean {SYNC}.timeout_seconds?"),
    (f"{SYNC}.canary=log", "sync.canary='log': unknown key", "max_probs_diff"),
    *((f"+{CUSTOM}.{key}.enabled=False", f"custom.{key}={{'enabled': False}}: ", f"Did you mean {SYNC}?")
      for key in ("snyc", "Sync", "syn", "syncs")),
    *((f"+{key}.enabled=False", f"{key}.enabled=False: nothing reads it there", f"Use {SYNC}.enabled.")
      for key in ("rollout.sync", "sync", "custom.sync", "actor_rollout_ref.rollout.sync")),
    # buckets
    *((f"{key}={bad}", f"{key}={bad}: {why}", f"{key}=512") for key in BUCKET for bad, why in (
        *((bad, "not a whole number of MiB") for bad in ("'auto'", True, 0.5)), (0, "a bucket must hold at least 1"))),
    ((f"{SHORT_BUCKET_KEY}=512", f"{LONG_BUCKET_KEY}=2048"), "are both given and differ", "Remove one"),
    # pauses and separate rollouts
    (f"{SYNC}.pause=retract", "sync.pause='retract' with", f"Set {OURS}"),
    (f"{SYNC}.pause=in_place", "sync.pause='in_place' with ", f"{SYNC}.pause=abort"),
    (f"{OURS[:-7]}-plugin", "backend=sync-plugin: no backend of verl's", "Did you mean sync_plugin?"),
    *(((OURS, *given), f"{OURS} with {said}: ", "trainer_mode=separate_async, or") for given, said in (
        ((), "trainer.v1.trainer_mode=sync"), (("trainer.use_v1=False",), "trainer.use_v1=False"))),
    *(((OURS, *ASYNC, f"+rollout.n_gpus_per_node={gpus}", f"+rollout.nnodes={nodes}"), said, remedy)
      for nodes, gpus, said, remedy in (
          (0, 8, "rollout.nnodes=0 and rollout.n_gpus_per_node=8: the rollout has no", "for example rollout.nnodes=1"),
          (1, 1, "rollout.nnodes=1 and rollout.n_gpus_per_node=1: ", "one engine needs 2"))),
    ((OURS, f"{SYNC}.enabled=False"), f"{SYNC}.enabled=False with {ROLL}", "another backend"),
    ((OURS, f"{SYNC}.pause=retract", "+rollout.own=1"), "sync.pause='retract' with trainer.v1.trainer_mode=sync",
     f"Set trainer.v1.trainer_mode=separate_async, or {SYNC}.pause=abort"),
    (("+sync=separate", f"{GPUS}=4"), f"rollout.nnodes=0 and {GPUS}=4 with trainer.v1.trainer_mode=separate_async",
     f"for example {ROLL}.nnodes=1 {GPUS}=4"),
    ((*SEPARATE, *SERVED_LORA, f"{SYNC}.pause=retract"),
     f"pause='retract' with {MODEL}.lora.merge=False and LoRA rank 8",
     f"Set {SYNC}.pause=abort, or {MODEL}.lora.merge=True"),
    ((OURS, f"{ROLL}.nnodes=1", f"{GPUS}=1"),
     f"{ROLL}.nnodes=1 and {GPUS}=1", "one engine needs 2"),
    ((OURS, f"{SYNC}.pause=in_place", *ASYNC, "+rollout.nnodes=1"),
     "sync.pause='in_place' with verl's fully_async", f"Set {SYNC}.pause=abort"),
    *(((*SERVED_LORA, f"{SYNC}.verify={verify}"), f"verify={verify!r} with", f"Set {SYNC}.verify=first, or ")
      for verify in ("always", 3)),
    # keys that nobody would follow
    *(((other, f"{SYNC}.{key}"), f"{SYNC}.{key} with {other}: ", f"Remove the former, or {remedy}")
      for key in ("verify=always", "enabled=True", "pause=retract")
      for other, remedy in ((f"{ROLL}.name=vllm", f"set {ROLL}.name to one of: sglang"),
                            (f"{ROLL}.name=sglng", ""), ("actor_rollout_ref.hybrid_engine=False", f"set {OURS}"))),
    ((f"{ROLL}.name=vllm", OURS), f"{OURS} with {ROLL}.name=vllm: ", "Remove"),
    ((f"{ROLL}.name=vllm", f"{SYNC}.verfy=always"), f"{SYNC}.verfy='always': unknown", f"Did you mean {SYNC}.verify?"),
    ((f"{ROLL}.name=vllm", f"{SHORT_BUCKET_KEY}=abc"), f"{SHORT_BUCKET_KEY}='abc': ", "=512"),
    # the guard on probabilities
    ((GUARD, f"{ROLL}.calculate_log_probs=False"), f"{GUARD} with {ROLL}.calculate_log_probs=False", "or remove"),
    ((GUARD, "algorithm.rollout_correction.bypass_mode=True"), "bypass_mode=True", f"or remove {GUARD[:-5]}"),
    ((GUARD, "trainer.use_v1=False"), "without one of verl's V1 trainers", f"or remove {GUARD[:-5]}"),
    # trainers
    ("actor_rollout_ref.actor.fsdp_config.qat.enable=True", "actor.fsdp_config.qat.enable=True: weight", "False"),
    (("model_engine=megatron", f"{MEGATRON}.vanilla_mbridge=True", f"++{MODEL}.lora.rank=x"), "lora.rank='x'", "for"),
    *((("model_engine=megatron", f"++{MEGATRON}.{key}=True"), f"{MEGATRON}.{key}=True: ", "Set it to False")
      for key in ("qat.enable", "override_ddp_config.overlap_param_gather")),
    # other keys of the rollout
    *((f"{ROLL}.{key}=abc", f"{ROLL}.{key}='abc': not a whole number", "for example 1")
      for key in ("nnodes", "n_gpus_per_node", "tensor_model_parallel_size", "data_parallel_size")),
    *((f"{ROLL}.multi_stage_wake_up={word}", f"multi_stage_wake_up={word!r}: not a boolean", "True or False")
      for word in ("no", "off", "yes", "on", "maybe", 1)),
    *((f"{ROLL}.dtype={name}", f"dtype={name!r}: not a dtype of SGLang's weights", "bfloat16")
      for name in ("bfloat17", "int8")),
    (f"{ROLL}.data_parallel_size=2", "data_parallel_size=2: ", "+" + SGL),
    (f"{ROLL}.pipeline_model_parallel_size=2", "pipeline_model_parallel_size=2: verl's engines have no", "Use 1"),
    ((OURS, "+rollout.nnodes=abc"), "rollout.nnodes='abc': not a whole number", "for example 1"),
    *(((*SEPARATE, f"+{ROLL}.checkpoint_engine.engine_kwargs.sync_plugin.{key}"), "weight sync writes it", f"{SYNC}.<")
      for key in ("timeout=5", "sync.verify=always")),
    (("model_engine=veomni", f"{SYNC}={{verify: first}}"), f"{SYNC}={{verify: first}} cannot be followed", "Remove"),
    # arguments of SGLang
    *((f"+{SGL}.{key}={value}", f"sglang.{key}={value!r}: ", f"{ROLL}.{ours}") for key, value, ours in (
        ("dp_size", 2, "data_parallel_size"), ("tp_size", 4, "tensor_model_parallel_size"))),
    (f"+{SGL}.model_path=/m", "sglang.model_path='/m': ", "Remove it, and set " + MODEL),
    ("+" + SGL + ".json_model_override_args='{\"quantization_config\":{}}'", "json_model_override_args=", "without"),
    *((f"+{SGL}.{key}={value}", f"sglang.{key}={value!r}: ", "Remove it") for key, value in (
        ("hicache_storage_backend", "file"), ("enable_lmcache", True), ("nnodes", 2), ("encoder_only", True),
        ("weight_cache_mode", "client"), ("elastic_ep_backend", "mooncake"), ("language_only", True),
        ("enable_elastic_expert_backup", True), ("radix_cache_backend", "flexkv"), ("enable_flexkv", True),
        ("enable_unified_cache_external_linker", True))),
    *((f"+{SGL}.{key}=True", f"sglang.{key}=True: SGLang keeps copies of weights", "False")
      for key in ("dcp_replicate_q_proj", "enable_cp_decode_attn_tp")),
    *((f"+{SGL}.{key}={value}", f"sglang.{key}={value!r}: weight sync cannot serve it", "enabled=False")
      for key, value in UNSERVED.items()),
    # DP attention leaves the number of ranks what it is, where it divides them
    *(((f"{ROLL}.tensor_model_parallel_size=4", *given), shown, "") for given, shown in (
        ((f"+{SGL}.dp_size=2",), "enable_dp_attention=True"),
        ((f"+{SGL}.dp_size=3", f"+{SGL}.enable_dp_attention=True"), "dp_size=3: "))),
]  # fmt: skip


@pytest.mark.parametrize(("given", "shown", "remedy"), REFUSED, ids=[shown for _, shown, _ in REFUSED])
def test_refused_by_key_value_and_remedy(given: str | tuple[str, ...], shown: str, remedy: str) -> None:
    text = refused(*((given,) if isinstance(given, str) else given))
    assert shown in text and remedy in text.partition(shown)[2], text


def test_what_serves_is_not_refused() -> None:
    sglang = {
        "dp_size": 2, "enable_dp_attention": True, "torchao_config": "''", "cpu_offload_gb": 0, "pp_size": 1,
        "quantization": "null", "kv_cache_dtype": "fp8_e5m2", "ep_size": 4, "weight_cache_mode": "off",
        "moe_runner_backend": "triton", "disaggregation_mode": "'null'", "dcp_replicate_q_proj": False,
    }  # fmt: skip
    others = {
        "tensor_model_parallel_size": 2, "data_parallel_size": 2, "dtype": "half", "expert_parallel_size": 4,
        "multi_stage_wake_up": False, "custom.sync.timeout_seconds": 86400,
    }  # fmt: skip
    given = [f"+{SGL}.{key}={value}" for key, value in sglang.items()]
    rollout = rollout_of(*given, *(f"{ROLL}.{key}={value}" for key, value in others.items()))
    assert rollout.multi_stage_wake_up is False and rollout.custom.sync.timeout_seconds == 86400
    assert rollout_of(GUARD).custom.sync.max_probs_diff == 0.02
    rollout_of(f"+{CUSTOM}.async.enabled=True", f"+{CUSTOM}.syntax=1", "+rollout.sync.every=5")  # somebody else's


def test_a_separate_rollout_may_keep_its_requests_and_its_backend_gets_the_settings() -> None:
    assert rollout_of(*SEPARATE, f"{SYNC}.pause=retract").custom.sync.pause == "retract"
    # As in a config of verl's one_step_off, which does not read the trainer's mode
    keys = (f"{SYNC}.pause=retract", f"{SYNC}.timeout_seconds=60", f"{ROLL}.dtype=float16")
    rollout = rollout_of(OURS, "+rollout.nnodes=1", "+rollout.n_gpus_per_node=2", *keys)
    rollout_of(OURS, "+rollout.nnodes=0", "+async_training.use_dynamic_resource_scheduling=True")
    given = rollout.checkpoint_engine.engine_kwargs[settings.SEPARATE_BACKEND]
    assert given.sync == {**given.sync, "timeout_seconds": 60, "pause": "retract"}
    assert (given.dtype, given.rollout) == ("float16", "sglang")
    engine = rollout_of(*SEPARATE).checkpoint_engine
    assert (engine.backend, engine.update_weights_bucket_megabytes) == (settings.SEPARATE_BACKEND, 512)


def test_an_error_that_nobody_foresaw_ends_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is omegaconf's; Hydra would make a warning of it and go on without any check."""
    text = refused(f"{SYNC}.timeout_seconds=${{nobody.knows}}")
    assert "InterpolationKeyError" in text and "nobody.knows" in text and f"{SYNC}.timeout_seconds" in text
    assert "VERL_USE_EXTERNAL_PLUGINS=none" in text

    def broken(*_: Any) -> None:
        raise AttributeError("nobody\nforesaw this")

    monkeypatch.setattr(driver, "check_rollout", broken)
    assert "cannot check the keys of this run: AttributeError: nobody foresaw this. Correct" in refused()
    for key in (f"{ROLL}.update_weights_bucket_megabyte", f"{CUSTOM}.bogus", "bogus"):  # Hydra's own
        with pytest.raises(ConfigCompositionException):
            rollout_of(f"{key}=1")


STOCK = OmegaConf.load(CONFIG_DIR / "rollout" / "rollout.yaml")
STOCK_MEGABYTES = STOCK.checkpoint_engine.update_weights_bucket_megabytes
BUCKETS = {
    (): settings.DEFAULT_MEGABYTES,
    (f"{SHORT_BUCKET_KEY}=64",): 64,
    (f"{LONG_BUCKET_KEY}=256",): 256,
    (f"{LONG_BUCKET_KEY}={STOCK_MEGABYTES}",): STOCK_MEGABYTES,  # verl's default, given by hand, counts as given
    (f"{LONG_BUCKET_KEY}=64", f"{SHORT_BUCKET_KEY}=64"): 64,
}


def unsettled(*overrides: str) -> DictConfig:
    """The rollout config of a program of the user's."""
    rollout: DictConfig = composed(*overrides).actor_rollout_ref.rollout
    return rollout


@pytest.mark.parametrize(
    ("name", "engine"), [("ppo_trainer", ()), ("ppo_trainer", ("model_engine=megatron",)), ("ppo_megatron_trainer", ())]
)
def test_both_bucket_keys_say_what_the_run_uses(name: str, engine: tuple[str, ...]) -> None:
    for overrides, megabytes in BUCKETS.items():
        raw: Any = OmegaConf.to_container(rollout_of(*engine, *overrides, name=name), resolve=False)
        assert raw["update_weights_bucket_megabytes"] == megabytes and raw["multi_stage_wake_up"] is True
        assert raw["checkpoint_engine"]["update_weights_bucket_megabytes"] == megabytes


def test_a_checkpoint_engine_of_verls_keeps_its_bucket_and_the_plugins_is_ours() -> None:
    separate = ("trainer.v1.trainer_mode=separate_async", f"{ROLL}.checkpoint_engine.backend=mooncake")
    for given, ours, verls in ((), 512, STOCK_MEGABYTES), ((f"{SHORT_BUCKET_KEY}=64",), 64, 64):
        config = config_of(*separate, *given)
        driver.apply_keys(config, resolved=True)  # the trainer, again
        rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        assert (settings.bucket_of(rollout), rollout.checkpoint_engine.update_weights_bucket_megabytes) == (ours, verls)


def test_a_config_without_our_keys_gets_our_defaults() -> None:
    """One that is written out holds verl's, as if they were given."""
    config, key = composed(name="_generated_ppo_trainer.yaml"), "update_weights_bucket_megabytes"
    rollout = config.actor_rollout_ref.rollout
    assert settings.bucket_of(omega_conf_to_dataclass(rollout)) == settings.DEFAULT_MEGABYTES
    for engine in (rollout.checkpoint_engine, {"backend": "naive"}):
        rollout.checkpoint_engine = engine
        assert driver.apply_keys(config, resolved=True) == "weight sync on" and rollout.multi_stage_wake_up is True
        assert rollout.checkpoint_engine[key] == settings.DEFAULT_MEGABYTES


@pytest.mark.parametrize("overrides", list(BUCKETS)[:3])
def test_without_a_driver_verls_dataclass_holds_the_same_and_explains_a_bad_key(overrides: tuple[str, ...]) -> None:
    config = omega_conf_to_dataclass(unsettled(*overrides))
    assert config.update_weights_bucket_megabytes == BUCKETS[overrides] and sync_config_of(config) == SyncConfig()
    assert config.checkpoint_engine.update_weights_bucket_megabytes == BUCKETS[overrides]
    with pytest.raises(Exception, match=re.escape(f"Did you mean {SYNC}.timeout_seconds?")):
        omega_conf_to_dataclass(unsettled(*overrides, f"{SYNC}.timeout_second=5"))


def test_settings_survive_the_trip_through_yaml_and_everything_else_is_verls() -> None:
    given: dict[str, Any] = {"timeout_seconds": 12.5, "verify": "always", "delivery": "staged", "max_probs_diff": 0.02}
    ours = unsettled(*(f"{SYNC}.{key}={value}" for key, value in given.items()), f"+{CUSTOM}.mine=1")
    config = omega_conf_to_dataclass(OmegaConf.create(OmegaConf.to_yaml(ours, resolve=True)))
    assert sync_config_of(config) == SyncConfig(**given)
    added = {"custom", "update_weights_bucket_megabytes", "multi_stage_wake_up"}
    for key in set(STOCK) - added - {"name", "_target_", "checkpoint_engine", "defaults"}:
        assert OmegaConf.to_container(ours)[key] == OmegaConf.to_container(STOCK)[key], key
    assert set(ours) - set(STOCK) <= added


def test_a_line_says_what_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    off, key, nccl = f"{SYNC}.enabled=False", f"{SYNC}.verify=7", f"{ROLL}.checkpoint_engine.backend=nccl"
    apart = "weight sync on; to the separate rollout nccl moves the weights"
    for program, overrides, line in (
        ("main_ppo", [off], driver.OFF),
        ("main_ppo", [off, key], f"{driver.OFF}, without {key}"),
        ("main_generation_server", [key], f"{driver.OFF}, without {key}"),
        ("main_ppo", [*SEPARATE, nccl, key], f"{apart}, without {key}"),
        ("main_ppo", [*SEPARATE, nccl], apart),
        ("main_ppo", [OURS, nccl, "trainer.use_v1=False", key], f"{driver.OFF}, without {key}"),
    ):
        config_of(*overrides, program=program)
        assert capsys.readouterr().out.strip().partition("driver: ")[2] == line


OFF = {"sync": {"enabled": False}}


def as_stock(rollout: DictConfig, sync: Any = None) -> None:
    """The rollout config is verl's own, but for a mark that the plugin is off where its classes look for it."""
    found: Any = OmegaConf.to_container(rollout, resolve=False)
    stock: Any = OmegaConf.to_container(STOCK, resolve=False)
    assert found.pop("custom", None) == sync
    assert {**found, "name": None} == {**stock, "name": None}


def test_a_rollout_config_of_the_users_counts_where_it_does_for_stock_verl(tmp_path: Path) -> None:
    (tmp_path / "own" / "rollout").mkdir(parents=True)
    OmegaConf.save(OmegaConf.merge(STOCK, {"mine": 42}), tmp_path / "own" / "rollout" / "rollout.yaml")
    own, verls, sglang = f"file://{tmp_path}/own", "pkg://verl.trainer.config", f"{ROLL}.name=sglang"
    for path, mine in (([own, verls], 42), ([verls, own], None)):
        OmegaConf.save({"hydra": {"searchpath": path}, "defaults": ["ppo_trainer", "_self_"]}, tmp_path / "main.yaml")
        rollout = hydra_run.run(tmp_path, sglang, name="main", config_dir=tmp_path).actor_rollout_ref.rollout
        assert rollout.get("mine") == mine and ("custom" in rollout) is (mine is None)
    defaults = ["ppo_trainer", {"/rollout@judge": "rollout"}, "_self_"]  # the group twice
    OmegaConf.save({"hydra": {"searchpath": [verls]}, "defaults": defaults}, tmp_path / "main.yaml")
    assert hydra_run.run(tmp_path, sglang, "judge.name=vllm", name="main", config_dir=tmp_path).judge.name == "vllm"


def test_what_verl_moves_has_verls_own_config(tmp_path: Path) -> None:
    as_stock(rollout_of(f"{SYNC}.enabled=False"), OFF)
    as_stock(rollout_of("actor_rollout_ref.hybrid_engine=False"), OFF)
    for key in (f"{SHORT_BUCKET_KEY}=64", f"{ROLL}.quantization=fp8", f"{SYNC}.enabled=False"):
        rollout_of(f"{ROLL}.name=vllm", key)
    config = omega_conf_to_dataclass(unsettled(f"{ROLL}.name=vllm", f"{SYNC}.enabled=False"))
    assert config.checkpoint_engine.update_weights_bucket_megabytes == STOCK_MEGABYTES
    as_stock(hydra_run.run(tmp_path, f"{ROLL}.name=vllm").actor_rollout_ref.rollout)
    found = rollout_of(f"+{SGL}.torchao_config=int8wo", program="main_generation_server")  # it syncs nothing
    assert found._target_ == STOCK._target_ and found.custom.sync.enabled is False


@pytest.mark.parametrize("overrides", [(), (f"{SYNC}.enabled=False",)])
def test_a_process_without_the_plugin_can_read_it(overrides: tuple[str, ...]) -> None:
    """As verl's legacy task runner, which resolves the config before anything imports the plugin."""
    text = OmegaConf.to_yaml(config_of(*overrides).actor_rollout_ref, resolve=False)
    resolvers = set(re.findall(r"\$\{([\w.]+):", text))
    assert resolvers and all(each.startswith("oc.") for each in resolvers), "omegaconf's own"


def test_every_job_of_a_multirun_is_checked_and_settled_in_the_trainer(tmp_path: Path) -> None:
    sglang = f"{ROLL}.name=sglang"
    with pytest.raises(SystemExit, match="timeout_seconds=-1"):
        hydra_run.multirun(tmp_path, sglang, f"{SYNC}.timeout_seconds=5,-1")
    # A job holds values already, and no longer what tells a default from a value that was given
    jobs = hydra_run.multirun(tmp_path, sglang, f"{SYNC}.enabled=True,False")
    for config in jobs:
        OmegaConf.resolve(config)
        driver.apply_keys(config, resolved=True)
    ours, stock = (config.actor_rollout_ref.rollout for config in jobs)
    assert ours.update_weights_bucket_megabytes == settings.DEFAULT_MEGABYTES and ours.multi_stage_wake_up is True
    assert stock.multi_stage_wake_up == STOCK.multi_stage_wake_up and OmegaConf.to_container(stock.custom) == OFF
    assert stock.checkpoint_engine.update_weights_bucket_megabytes == STOCK_MEGABYTES


def test_a_multirun_without_a_trainer_that_settles_is_told_what_to_set(tmp_path: Path) -> None:
    """Hydra has copied the config when a job of a multirun is announced; V1's trainers settle it themselves."""
    lora = (f"{ROLL}.name=sglang", f"{MODEL}.lora.rank=8", f"{MODEL}.lora.merge=True")
    assert len(hydra_run.multirun(tmp_path, *lora, "+rollout.own=1")) == 1
    veomni = lora[0], "model_engine=veomni"
    for given, said in ((lora, r"\.lora_rank=8 .*\.lora_alpha=32"), (veomni, r"custom\.sync\.enabled=False")):
        for other in ("trainer.use_v1=False", "+rollout.nnodes=1"):  # one_step_off's main has V1's name
            with pytest.raises(SystemExit, match=rf"--multirun.*{said}"):
                hydra_run.multirun(tmp_path, *given, other)


@pytest.mark.parametrize("wrap", [dict, OmegaConf.create])
def test_defaults_and_mappings(wrap: Callable[..., Any]) -> None:
    assert SyncConfig() == SyncConfig(True, 300.0, "first", "abort", "auto", None)
    assert sync_config_of(wrap({"custom": {"sync": {"timeout_seconds": 5}}})) == SyncConfig(timeout_seconds=5)
    for config in ({}, *({"custom": custom} for custom in (None, {}, {"sync": None}, {"sync": {}}, {"other": 1}))):
        assert sync_config_of(wrap(config)) == SyncConfig()
    for custom, text in (
        (5, "rollout.custom=5: not a mapping. Use actor_rollout_ref.rollout.custom.<key>=<value>."),
        ({"sync": ["enabled"]}, f"{SYNC}=['enabled']: not a mapping. Use {SYNC}.<key>=<value>."),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            sync_config_of(wrap({"custom": custom}))


@pytest.mark.parametrize(("key", "values", "remedy"), [
    ("enabled", ("yes", 1, None), f"Use {SYNC}.enabled=True or False."),
    ("timeout_seconds", (0, -1.5, True, "300", float("inf"), float("nan"), None, 86401), "Use for example 300"),
    ("verify", ("sometimes", True, 0, 1.5, None), "Use one of never, first, always, or a number: 10 for every"),
    ("pause", ("stop", 3, None), "Use one of abort, retract, in_place."),
    ("delivery", ("in-place", "broadcast", None, ["auto"]), "Use one of auto, staged."),
    ("max_probs_diff", (0, 2, True, "much", float("nan")), "Use for example 0.02, or remove it."),
    ("zzz", (5,), "unknown key. Known keys: enabled, timeout_seconds, verify, pause, delivery, max_probs_diff."),
])  # fmt: skip
def test_a_bad_value_names_key_value_and_remedy(key: str, values: tuple[Any, ...], remedy: str) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{re.escape(f'{SYNC}.{key}={value!r}: ')}.*{re.escape(remedy)}"):
            SyncConfig.from_mapping({key: value})
