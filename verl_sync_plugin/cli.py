# SPDX-License-Identifier: Apache-2.0
"""``verl-sync``: looks at an environment and at a model without starting a run."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys

from verl_sync_plugin import __version__
from verl_sync_plugin.config.bucket_size import AUTO, DEFAULT_MEGABYTES, auto_megabytes

PACKAGES = (
    "verl",
    "sglang",
    "torch",
    "transformers",
    "ray",
    "hydra-core",
    "torch-memory-saver",
    "peft",
    "megatron-core",
    "megatron-bridge",
    "mbridge",
)


def doctor() -> int:
    """Prints the versions on this machine, and whether verl here uses the plugin's rollout adapter; 0 when it does.

    Looks neither at GPUs nor at the keys of a run, nor at other machines.
    """
    print(f"verl-sync-plugin {__version__}")
    for package in PACKAGES:
        try:
            print(f"  {package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"  {package} is not installed")
    problems = _problems()
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print("ready" if not problems else f"{len(problems)} problem(s)")
    return 1 if problems else 0


def _problems() -> list[str]:
    found = []
    points = [p.value for p in importlib.metadata.entry_points(group="verl.plugins")]
    if "verl_sync_plugin.plugin" not in points:
        found.append("no entry point in the group verl.plugins: install the package with pip instead of PYTHONPATH")
    for module in ("verl", "sglang"):
        if importlib.util.find_spec(module) is None:
            found.append(f"{module} is not installed: pip install it first")
    if found:
        return found
    try:
        import verl  # noqa: F401  (loads the plugin)
        from verl.workers.rollout.base import _ROLLOUT_REGISTRY

        from verl_sync_plugin.registered import MODE
        from verl_sync_plugin.rollouts import ROLLOUTS, rollout_of
    except (ImportError, SystemExit) as error:
        return [str(error)]
    for name in ROLLOUTS:
        if (adapter := _ROLLOUT_REGISTRY[name, MODE]) != rollout_of(name).adapter:
            found.append(
                f"verl's rollout adapter for {name} is {adapter}: "
                "unset VERL_USE_EXTERNAL_PLUGINS, or uninstall the other plugin"
            )
    return found


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


def main(argv: list[str] | None = None) -> int:
    """Entry of the console script."""
    parser = argparse.ArgumentParser(prog="verl-sync", description="weight sync for verl: checks and plans")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="versions on this machine, and whether verl here loads the plugin")
    planning = commands.add_parser("plan", help="the buckets in which an FSDP2 trainer would send a model")
    planning.add_argument("model")
    planning.add_argument("--world", type=int, default=8, help="FSDP ranks")
    planning.add_argument("--bucket-mb", default=str(DEFAULT_MEGABYTES), help=f"MiB, or {AUTO} with --spare-gb")
    planning.add_argument("--spare-gb", type=float, help="GiB that trainer and awake engine leave free on each GPU")
    arguments = parser.parse_args(argv)
    if arguments.command == "doctor":
        return doctor()
    if arguments.world < 1:
        parser.error("--world must be at least 1")
    try:
        megabytes = _bucket_megabytes(arguments.bucket_mb, arguments.spare_gb)
    except ValueError as error:
        parser.error(str(error))
    return plan(arguments.model, arguments.world, megabytes)


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


if __name__ == "__main__":
    sys.exit(main())
