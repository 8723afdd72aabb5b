# SPDX-License-Identifier: Apache-2.0
"""Says what a sync of a run's model sends, from the model's config and the planner of a run; no weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_sync_plugin.cli.doctor.findings import Finding, ok, warning

CHECK = "model"


def check_model(config: Any) -> list[Finding]:
    """Plans the model of a composed config whose folder is on this machine; any other is left to the run.

    Args:
        config: verl's, as the driver settled it.
    """
    key, path = "actor_rollout_ref.model.path", str(config.actor_rollout_ref.model.get("path"))
    folder = Path(path).expanduser()
    if path.startswith(("/", "./", "../", "~")) and not folder.is_dir():
        return [warning(CHECK, f"{key}={path}: there is no such folder on this machine", "correct the path")]
    if not (folder / "config.json").is_file():
        return []
    try:
        return [ok(CHECK, _sent(str(folder), config.actor_rollout_ref.rollout))]
    except Exception as error:  # whatever transformers makes of a config
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return [
            warning(
                CHECK,
                f"{key}={path}: no model can be built from its config: {text}",
                "is transformers new enough, and is its code transformers' own?",
            )
        ]


def _sent(folder: str, rollout: Any) -> str:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from verl_sync_plugin.trainers.fsdp2 import StateDictSource
    from verl_sync_plugin.trainers.naming import checkpoint_rewrite
    from verl_sync_plugin.trainers.wire import wire_policy

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        module = kind.from_config(config)
    tied = frozenset(getattr(module, "all_tied_weights_keys", None) or ())
    policy = wire_policy(str(rollout.dtype))
    source = StateDictSource(module.state_dict, policy, checkpoint_rewrite(module), tied)
    megabytes = rollout.checkpoint_engine.update_weights_bucket_megabytes
    plan = source.plan(tuple(shard.base for shard in source.shards()), int(megabytes) << 20)
    size = f"{plan.tensor_count} tensors, {plan.nbytes / 1e9:.3f} GB as {rollout.dtype}"
    return f"{config.model_type}: a sync sends {size}, or {len(plan.buckets)} buckets of at most {megabytes} MiB"
