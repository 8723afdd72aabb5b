#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GRPO on GSM8K: Megatron trainer (tensor, pipeline and expert parallel), SGLang rollout on the same GPUs. Needs
# Megatron-Bridge, TransformerEngine, and GSM8K (python examples/data/gsm8k.py ~/data/gsm8k):
#   NGPUS=8 TRAIN_TP=2 TRAIN_PP=2 ROLLOUT_TP=2 bash run_megatron.sh [hydra overrides]
#   MODEL_PATH=Qwen/Qwen3-30B-A3B NGPUS=8 TRAIN_TP=1 TRAIN_PP=1 TRAIN_EP=8 ROLLOUT_TP=4 bash run_megatron.sh
set -euxo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}
NGPUS=${NGPUS:-8}
NNODES=${NNODES:-1}
TRAIN_TP=${TRAIN_TP:-2}
TRAIN_PP=${TRAIN_PP:-2}
TRAIN_EP=${TRAIN_EP:-1}
ROLLOUT_TP=${ROLLOUT_TP:-2}

python3 -m verl.trainer.main_ppo \
    model_engine=megatron \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    data.truncation=error \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size="$TRAIN_TP" \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="$TRAIN_PP" \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size="$TRAIN_EP" \
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
    actor_rollout_ref.actor.megatron.param_offload=True \
    actor_rollout_ref.actor.megatron.optimizer_offload=True \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP" \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.multi_stage_wake_up=True \
    actor_rollout_ref.rollout.update_weights_bucket_megabytes=512 \
    trainer.logger='["console"]' \
    trainer.project_name=verl_sync_plugin \
    trainer.experiment_name=megatron \
    trainer.n_gpus_per_node="$NGPUS" \
    trainer.nnodes="$NNODES" \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 "$@"
