#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two steps of verl's own main_ppo with a tiny random model, real Ray, FSDP and SGLang, on a machine without a GPU.
# Usage: [N_GPUS=1] [ROLLOUT_TP=1] [STRATEGY=fsdp2] [MODEL_KIND=qwen2] [STEPS=2] [WORK=folder] run.sh [hydra overrides]
# The whole log goes to $WORK/run.log; the terminal shows the plugin's lines of it, and everything with SHOW=all.
# With STRATEGY=megatron also: [TRAIN_TP=1] [TRAIN_PP=1] [TRAIN_EP=1]; MODEL_KIND=qwen3-moe has experts;
# [MAIN=verl.trainer.main_ppo] is another one of verl's mains, for example verl.experimental.one_step_off_policy.main_ppo
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3}
N_GPUS=${N_GPUS:-1}
ROLLOUT_TP=${ROLLOUT_TP:-1}
STRATEGY=${STRATEGY:-fsdp2}
MODEL_KIND=${MODEL_KIND:-qwen2}
STEPS=${STEPS:-2}
MAIN=${MAIN:-verl.trainer.main_ppo}
WORK=${WORK:-$HERE/../../.quickstart}
mkdir -p "$WORK"
WORK=$(cd "$WORK" && pwd)
MODEL=${MODEL:-$WORK/models/$MODEL_KIND}
DATA=$WORK/data.parquet
LOG=$WORK/run.log
SHOW=${SHOW:-plugin}
if [[ -z ${VERL_SYNC_REPORT_FILE:-} ]]; then # one line per sync; a page is made of it below
    REPORTS=$WORK/reports.jsonl
    rm -f "$REPORTS"
    export VERL_SYNC_REPORT_FILE=$REPORTS
fi

# The only setting that the CPU stack itself needs
export VERL_PLATFORM=cpu
# SGLang binds each tensor parallel rank to the cores named here, separated by "|"
SGLANG_CPU_OMP_THREADS_BIND=$(seq -s'|' 0 $((ROLLOUT_TP - 1)))
export SGLANG_CPU_OMP_THREADS_BIND
# Small machines: one thread per process; nothing is fetched or reported
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=disabled RAY_USAGE_STATS_ENABLED=0
export HYDRA_FULL_ERROR=1 RAY_DEDUP_LOGS=0

[[ -f $MODEL/config.json ]] || "$PYTHON" "$HERE/make_model.py" "$MODEL_KIND" "$MODEL"
[[ -f $DATA ]] || "$PYTHON" "$HERE/make_data.py" "$DATA"

ACTOR=actor_rollout_ref.actor
ROLLOUT=actor_rollout_ref.rollout
SGLANG=$ROLLOUT.engine_kwargs.sglang
overrides=(
    # What verl-sync-plugin adds: size of a bucket of weights
    "$ROLLOUT.update_weights_bucket_megabytes=512"

    algorithm.adv_estimator=grpo
    "data.train_files=$DATA" "data.val_files=$DATA"
    data.train_batch_size=4 data.max_prompt_length=64 data.max_response_length=16 data.dataloader_num_workers=0

    "actor_rollout_ref.model.path=$MODEL"
    actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.model.enable_gradient_checkpointing=False
    +actor_rollout_ref.model.override_config.attn_implementation=sdpa

    "$ACTOR.strategy=$STRATEGY" "$ACTOR.optim.lr=1e-2"
    "$ACTOR.ppo_mini_batch_size=4" "$ACTOR.ppo_micro_batch_size_per_gpu=2"
    "$ACTOR.use_kl_loss=False" "$ACTOR.use_torch_compile=False"

    "$ROLLOUT.name=sglang" "$ROLLOUT.tensor_model_parallel_size=$ROLLOUT_TP" "$ROLLOUT.n=2"
    "$ROLLOUT.load_format=auto" "$ROLLOUT.enforce_eager=True" "$ROLLOUT.calculate_log_probs=True"
    "$ROLLOUT.gpu_memory_utilization=0.1" "$ROLLOUT.max_num_seqs=16" "$ROLLOUT.agent.num_workers=1"
    "$ROLLOUT.log_prob_micro_batch_size_per_gpu=2"
    "+$SGLANG.device=cpu" "+$SGLANG.attention_backend=torch_native" "+$SGLANG.sampling_backend=pytorch"
    "+$SGLANG.enable_memory_saver=False" "+$SGLANG.disable_overlap_schedule=True"
    "+$SGLANG.max_total_tokens=8192" "+$SGLANG.log_level=warning"

    "reward.custom_reward_function.path=$HERE/reward.py" reward.num_workers=1
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1

    trainer.device=cpu trainer.nnodes=1 "trainer.n_gpus_per_node=$N_GPUS" "trainer.total_training_steps=$STEPS"
    trainer.save_freq=-1 trainer.test_freq=-1 trainer.val_before_train=False
    'trainer.logger=["console"]' "trainer.default_local_dir=$WORK/checkpoints" "hydra.run.dir=$WORK/hydra"

    # Ray hands out logical GPUs, one per rank, and more cores than a small machine has
    "+ray_kwargs.ray_init.num_gpus=$N_GPUS" ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.include_dashboard=False
)

if [[ $STRATEGY == megatron ]]; then
    # Megatron's own layers instead of TransformerEngine's, which does not exist for the CPU
    export VERL_CPU_MCORE=1
    MEGATRON=$ACTOR.megatron
    # scripts/setup_venv.sh puts Megatron-Bridge and its megatron-core there
    BRIDGE=$("$PYTHON" -c 'import sys; print(sys.prefix)')/megatron-bridge
    [[ -d $BRIDGE ]] && export PYTHONPATH=$BRIDGE${PYTHONPATH:+:$PYTHONPATH}
    TRANSFORMER=$MEGATRON.override_transformer_config
    overrides+=(
        model_engine=megatron
        "$MEGATRON.tensor_model_parallel_size=${TRAIN_TP:-1}" "$MEGATRON.pipeline_model_parallel_size=${TRAIN_PP:-1}"
        "$MEGATRON.expert_model_parallel_size=${TRAIN_EP:-1}"
        "$MEGATRON.use_distributed_optimizer=True"
        "$MEGATRON.sequence_parallel=False" "$MEGATRON.use_remove_padding=False"
        "+$TRANSFORMER.sequence_parallel=False" "+$TRANSFORMER.use_cpu_initialization=True"
        "++$TRANSFORMER.attention_backend=unfused" "++$TRANSFORMER.apply_rope_fusion=False"
        "+$TRANSFORMER.gradient_accumulation_fusion=False" "+$TRANSFORMER.bias_dropout_fusion=False"
        "+$TRANSFORMER.masked_softmax_fusion=False" "+$TRANSFORMER.bias_activation_fusion=False"
        "+$TRANSFORMER.persist_layer_norm=False"
        # What Megatron-Bridge turns on by itself
        "+$TRANSFORMER.moe_permute_fusion=False" "+$TRANSFORMER.moe_router_fusion=False"
        "+$TRANSFORMER.moe_shared_expert_overlap=False" "+$TRANSFORMER.cross_entropy_loss_fusion=False"
        "+$TRANSFORMER.transformer_impl=local"
    )
fi

shown() {
    if [[ $SHOW == all ]]; then cat; else grep --line-buffered -oE '\[verl-sync-plugin\].*|\bstep:[0-9]+ ' || true; fi
}

# Not in the source tree: Python would prefer the sources here to the installed package
cd "$WORK"
echo "quickstart: $STEPS steps of $MAIN, two to four minutes; the log goes to $LOG"
status=0
"$PYTHON" -m "$MAIN" "${overrides[@]}" "$@" 2>&1 | tee "$LOG" | shown || status=$?
grep -q "step:$STEPS " "$LOG" || { status=$((status ? status : 1)); echo "quickstart: step $STEPS is not in $LOG" >&2; }
if ((status)); then
    [[ $SHOW == all ]] || tail -n 30 "$LOG" >&2
    exit "$status"
fi

last=$(grep -oE 'sync of step [0-9]+: [0-9.]+ s, .*' "$LOG" | tail -n 1 || true)
page="none, the reports are in $VERL_SYNC_REPORT_FILE"
if [[ -f ${REPORTS:-} ]] &&
    "$PYTHON" -m verl_sync_plugin.cli report "$REPORTS" --out "$WORK/sync-report.html" >> "$LOG" 2>&1; then
    page=$WORK/sync-report.html
fi
echo "quickstart: reached step $STEPS. Real Ray, verl and SGLang trained a tiny model on this CPU."
echo "  shown: ${last:-stock verl moved the weights}"
echo "  page:  $page"
echo "  log:   $LOG"
echo "  next:  pip install . in this clone where verl and SGLang run on GPUs, verl-sync doctor, then your own command unchanged"
