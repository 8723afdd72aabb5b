# SPDX-License-Identifier: Apache-2.0
"""The command line and environment of one ``main_ppo`` run: the same for both variants but for what is compared."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.phase import trainer_overrides
from benchmarks.phase.cases import Case, Paths, batch_of, samples_of

PROBE = "benchmarks.phase.probe"
LOCAL_MEGATRON = "benchmarks.phase.local_megatron"
_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_SGLANG = f"+{_ROLLOUT}.engine_kwargs.sglang"
_SHARES = {"7b": 0.4, "moe-8b": 0.2, "moe-16b": 0.2, "mla-7b": 0.2}  # of the device's memory, for the engine


def _common(case: Case, paths: Paths) -> list[str]:
    batch, response = batch_of(case.device), 16 if case.device == "cpu" else 64
    micro = batch // 2
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={paths.prompts}",
        f"data.val_files={paths.prompts}",
        f"data.train_batch_size={batch}",
        "data.max_prompt_length=128",
        f"data.max_response_length={response}",
        "data.filter_overlong_prompts=False",
        "data.dataloader_num_workers=0",
        f"{_MODEL}.path={paths.model}",
        f"{_MODEL}.use_remove_padding=False",
        f"+{_MODEL}.override_config.attn_implementation=sdpa",
        f"{_ACTOR}.ppo_mini_batch_size={batch}",
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu={micro}",
        f"{_ACTOR}.use_kl_loss=False",
        f"{_ROLLOUT}.name=sglang",
        f"{_ROLLOUT}.tensor_model_parallel_size={case.rollout_tp}",
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu={micro}",
        f"{_SGLANG}.sampling_backend=pytorch",
        f"reward.custom_reward_function.path={paths.reward}",
        "reward.custom_reward_function.name=compute_score",
        "reward.num_workers=1",
        f"trainer.n_gpus_per_node={case.gpus}",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={case.steps}",
        "trainer.total_epochs=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        'trainer.logger=["console"]',
    ]


def _cuda(case: Case) -> list[str]:
    overrides = [
        f"{_ACTOR}.optim.lr=1e-6",
        f"{_ROLLOUT}.n={samples_of(case.device)}",
        f"{_ROLLOUT}.gpu_memory_utilization={_SHARES.get(case.model_size, 0.3)}",
        f"{_ROLLOUT}.agent.num_workers=2",
        f"{_SGLANG}.attention_backend=triton",
        f"{_SGLANG}.grammar_backend=none",
        f"{_SGLANG}.disable_piecewise_cuda_graph=True",
        f"{_SGLANG}.cuda_graph_bs=[1,4,16,64]",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=2",
    ]
    if case.rollout_tp > 1:
        overrides.append(f"{_SGLANG}.disable_custom_all_reduce=True")
    return overrides


def _cpu(case: Case) -> list[str]:
    return [
        f"{_ACTOR}.optim.lr=1e-2",
        f"{_ACTOR}.use_torch_compile=False",
        f"{_MODEL}.enable_gradient_checkpointing=False",
        f"{_ROLLOUT}.n={samples_of(case.device)}",
        f"{_ROLLOUT}.gpu_memory_utilization=0.1",
        f"{_ROLLOUT}.enforce_eager=True",
        f"{_ROLLOUT}.max_num_seqs=16",
        f"{_ROLLOUT}.agent.num_workers=1",
        f"{_ROLLOUT}.load_format=auto",
        f"{_SGLANG}.device=cpu",
        f"{_SGLANG}.attention_backend=torch_native",
        f"{_SGLANG}.enable_memory_saver=False",
        f"{_SGLANG}.disable_overlap_schedule=True",
        f"{_SGLANG}.max_total_tokens=8192",
        f"{_SGLANG}.log_level=warning",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.device=cpu",
        "ray_kwargs.ray_init.num_cpus=16",
        f"+ray_kwargs.ray_init.num_gpus={case.gpus + case.rollout_gpus}",
        "+ray_kwargs.ray_init.include_dashboard=False",
    ]


def _lora(case: Case) -> list[str]:
    if not case.lora_rank:
        return []
    # verl's two trainers read these from different keys
    rank, alpha = ("lora.rank", "lora.alpha") if case.strategy == "megatron" else ("lora_rank", "lora_alpha")
    return [
        f"{_MODEL}.{rank}={case.lora_rank}",
        f"{_MODEL}.{alpha}={case.lora_rank}",
        f"{_MODEL}.lora.merge=True",
    ]


def _bucket(case: Case, variant: str) -> str:
    # the short key is the plugin's; stock verl 0.9 refuses it
    key = (
        "update_weights_bucket_megabytes"
        if variant == "plugin"
        else "checkpoint_engine.update_weights_bucket_megabytes"
    )
    return f"{_ROLLOUT}.{key}={case.bucket_mb}"


def _separate(case: Case, variant: str) -> list[str]:
    if not case.rollout_gpus:
        return []
    backend = "sync_plugin" if variant == "plugin" else "nccl"
    return [
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "trainer.v1.separate_async.num_warmup_batches=1",
        f"{_ROLLOUT}.nnodes=1",
        f"{_ROLLOUT}.n_gpus_per_node={case.rollout_gpus}",
        f"{_ROLLOUT}.checkpoint_engine.backend={backend}",
    ]


def training(case: Case, variant: str, paths: Paths) -> list[str]:
    """The command of one run."""
    device = _cpu(case) if case.device == "cpu" else _cuda(case)
    overrides = [
        *_common(case, paths),
        *device,
        *trainer_overrides.of(case),
        *_lora(case),
        _bucket(case, variant),
        *_separate(case, variant),
        *case.extra,
        *(case.plugin_extra if variant == "plugin" else ()),
    ]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]


def environment(case: Case, variant: str, probe_file: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of one run: ``base``, the probe, and the plugin for the plugin variant alone."""
    env = dict(base)
    # the plugin's own report goes into the same file
    env.update(SYNC_PROBE_FILE=str(probe_file), VERL_SYNC_REPORT_FILE=str(probe_file))
    env.update(RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0", HYDRA_FULL_ERROR="1")
    # Where the machine's memory grows as it is used, its total starts small, and Ray's monitor, which reads that, would
    # kill healthy runs.
    env["RAY_memory_monitor_refresh_ms"] = "0"
    ours = [PROBE, LOCAL_MEGATRON] if case.strategy == "megatron" and case.device == "cuda" else [PROBE]
    modules = [name for name in env.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if name and name not in ours]
    env["VERL_USE_EXTERNAL_MODULES"] = ",".join([*modules, *ours])
    if variant == "stock":
        # both hosts discover entry points; "none" is the first's word, and for the second a name nobody has
        env.update(VERL_USE_EXTERNAL_PLUGINS="none", SGLANG_PLUGINS="none")
    else:
        env.pop("VERL_USE_EXTERNAL_PLUGINS", None)
        env.pop("SGLANG_PLUGINS", None)
    if case.device == "cpu":
        env.update(VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda", SGLANG_USE_CPU_ENGINE="1")
        env.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(index) for index in range(case.rollout_tp))
        if case.strategy == "megatron":
            env["VERL_CPU_MCORE"] = "1"
    return env
