# SPDX-License-Identifier: Apache-2.0
"""``verl-sync plan``: the buckets in which a model would be sent."""

from __future__ import annotations

import argparse
from typing import Any

from verl_sync_plugin.config.bucket_size import AUTO, DEFAULT_MEGABYTES, auto_megabytes


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the subcommand to argparse's ``subparsers``, and returns its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan", help="the buckets in which an FSDP2 trainer would send a model"
    )
    parser.add_argument("model")
    parser.add_argument("--world", type=int, default=8, help="FSDP ranks")
    parser.add_argument("--bucket-mb", default=str(DEFAULT_MEGABYTES), help=f"MiB, or {AUTO} with --spare-gb")
    parser.add_argument("--spare-gb", type=float, help="GiB that trainer and awake engine leave free on each GPU")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand with its parsed arguments; the result is the exit code.

    Raises:
        ValueError: an option has a value that is refused; names option, value and remedy.
    """
    if arguments.world < 1:
        raise ValueError("--world must be at least 1")
    return plan(arguments.model, arguments.world, _bucket_megabytes(arguments.bucket_mb, arguments.spare_gb))


def plan(model: str, world: int, bucket_megabytes: int) -> int:
    """Prints tensors, bytes, buckets and staging memory of an FSDP2 trainer's sync; reads the model's config only.

    Counts every parameter of a causal language model in bf16, without adapters, for each delivery that stages.

    Args:
        model: path or name of a HF model.
        world: number of FSDP ranks.
        bucket_megabytes: size of a bucket in MiB.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl_sync_plugin.layout.planner import plan_buckets
    from verl_sync_plugin.layout.tensors import Base
    from verl_sync_plugin.sync.sender import SLOTS, slot_limit
    from verl_sync_plugin.trainers.dtensors import even_chunks
    from verl_sync_plugin.trainers.naming import hf_views, verl_rewrite

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    rewrite = verl_rewrite(config.model_type)
    bases = []
    for name, tensor in module.named_parameters():
        rows = tensor.shape[0]
        lengths = even_chunks(rows, world, tensor.numel() // rows) if world > 1 else (tensor.numel(),)
        views = hf_views(name, tuple(tensor.shape), tensor.dtype, 0, rewrite)
        bases.append(Base(name, "bfloat16", 2, lengths, tuple(views)))
    for delivery in ("sharded", "gathered") if world > 1 else ("gathered",):
        made = plan_buckets(tuple(bases), slot_limit(bucket_megabytes << 20), sharded=delivery == "sharded")
        how = f" ({delivery})" if world > 1 else ""
        print(f"{made.tensor_count} tensors, {made.nbytes / 1e9:.3f} GB in {len(made.buckets)} buckets{how}")
        print(f"staging memory per GPU: {min(SLOTS, len(made.buckets)) * made.slot_bytes / 2**20:.0f} MiB")
    return 0


def _bucket_megabytes(word: str, spare_gigabytes: float | None) -> int:
    """The size that the two options mean; with ``auto`` what a run would choose.

    Raises:
        ValueError: names option, value and remedy.
    """
    if word == AUTO and spare_gigabytes is not None:
        chosen = auto_megabytes(int(spare_gigabytes * 2**30))
        print(f"auto: buckets of {chosen} MiB")
        return chosen
    if word == AUTO:
        raise ValueError(f"--bucket-mb {AUTO} is chosen from free memory; say how much that is with --spare-gb")
    if not word.isdecimal() or int(word) < 1:
        raise ValueError(f"--bucket-mb {word}: neither a whole number of MiB from 1 on nor {AUTO}; use 512")
    return int(word)
