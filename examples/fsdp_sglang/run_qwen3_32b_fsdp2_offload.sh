#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GRPO with Qwen3-32B where GPU memory is tight: parameters and optimizer on the host while the engine generates, small
# staging buffers. See configs/sync/colocated_tight_memory.yaml.
#   NGPUS=8 NNODES=2 ROLLOUT_TP=8 bash run_qwen3_32b_fsdp2_offload.sh [hydra overrides]
set -euxo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-32B}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}
NGPUS=${NGPUS:-8}
NNODES=${NNODES:-2}
ROLLOUT_TP=${ROLLOUT_TP:-8}

python3 -m verl.trainer.main_ppo \
    +sync=colocated_tight_memory \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=4096 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP" \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
    trainer.logger='["console"]' \
    trainer.project_name=verl_sync_plugin \
    trainer.experiment_name=qwen3_32b_fsdp2 \
    trainer.n_gpus_per_node="$NGPUS" \
    trainer.nnodes="$NNODES" \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    trainer.total_epochs=5 "$@"
