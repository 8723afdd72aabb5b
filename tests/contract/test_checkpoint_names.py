# SPDX-License-Identifier: Apache-2.0
"""FSDP and FSDP2 of models that were loaded from a checkpoint: what arrives is named and cut as the checkpoint is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_fsdp_sources import LARGE, TINY, check_arrival, one_sync
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig, Qwen2Config
from worlds import run_world

from contract.fsdp_layouts import Layout, shard
from verl_sync_plugin.trainers.base import ParameterSource, WirePolicy
from verl_sync_plugin.trainers.fsdp1 import FSDP1Source
from verl_sync_plugin.trainers.fsdp2 import FSDP2Source
from verl_sync_plugin.trainers.naming import checkpoint_rewrite

SIZES = {
    "hidden_size": 60, "intermediate_size": 85, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 323,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
}


def sync(folder: str, layout: Layout) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rewrite, unsaved = checkpoint_rewrite(model), frozenset(model.all_tied_weights_keys)
    module, policy = shard(model, layout), WirePolicy(torch.float32)
    source: ParameterSource
    if isinstance(module, FullyShardedDataParallel):
        source = FSDP1Source(module, policy, rewrite, lambda state: state, unsaved)
    else:
        source = FSDP2Source(module, policy, rewrite, unsaved=unsaved)
    for bucket_bytes, sharded in ((LARGE, False), (TINY, True)):
        got, _ = one_sync(module, source, bucket_bytes, sharded)
        check_arrival(got, load_file(Path(folder) / "model.safetensors"))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "layout", [Layout((3,)), Layout((2,), "FULL_SHARD"), Layout((2,), "FULL_SHARD", True)], ids=str
)
def test_the_checkpoint_arrives_as_it_was(name: str, layout: Layout, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).save_pretrained(tmp_path)
    run_world(layout.size, sync, str(tmp_path), layout)
