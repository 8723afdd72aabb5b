# SPDX-License-Identifier: Apache-2.0
"""From the options of ``verl-sync plan`` to its result."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from verl_sync_plugin.cli.plan import links
from verl_sync_plugin.cli.plan.delivery import DELIVERIES, Ways, choose
from verl_sync_plugin.cli.plan.memory import GIB, MASTER, Machine, moments, warnings_of
from verl_sync_plugin.cli.plan.model import Model, read_model
from verl_sync_plugin.cli.plan.parts import Trainer, plan_of
from verl_sync_plugin.config.bucket_size import AUTO, DEFAULT_MEGABYTES, auto_megabytes


@dataclass(frozen=True)
class Options:
    """What was asked for, checked.

    Attributes:
        model: path or name.
        trainer: how the model is shared out.
        tp: the rollout's tensor parallelism.
        delivery: as asked for.
        megabytes: size of a bucket in MiB.
        per_node: GPUs of a node.
        link: between the GPUs of a node.
        machine: the GPU.
    """

    model: str
    trainer: Trainer
    tp: int
    delivery: str
    megabytes: int
    per_node: int
    link: str
    machine: Machine


def read(given: argparse.Namespace) -> Options:
    """Checks the options.

    Raises:
        ValueError: names option, value and remedy.
    """
    if given.delivery not in DELIVERIES:
        raise ValueError(f"--delivery {given.delivery}: not known; use one of {', '.join(DELIVERIES)}")
    if given.rollout_tp < 1 or given.gpus_per_node < 1:
        raise ValueError("--rollout-tp and --gpus-per-node must be at least 1")
    if not 0 < given.memory_fraction <= 1:
        raise ValueError(f"--memory-fraction {given.memory_fraction:g}: not above 0 and up to 1; use for example 0.5")
    if given.gpu_memory_gb < 0 or given.reserve_gb < 0:
        raise ValueError("--gpu-memory-gb and --reserve-gb must not be negative")
    megatron = given.trainer == "megatron"
    etp = given.etp if given.etp is not None else (given.tp if megatron and given.ep == 1 else 1)
    return Options(
        model=given.model,
        trainer=Trainer(given.trainer, given.world, given.tp, given.pp, given.ep, etp),
        tp=given.rollout_tp,
        delivery=given.delivery,
        megabytes=bucket_megabytes(given.bucket_mb, given.spare_gb),
        per_node=given.gpus_per_node,
        link=given.link,
        machine=Machine(
            int(given.gpu_memory_gb * GIB),
            given.memory_fraction,
            int(given.reserve_gb * GIB),
            given.param_offload,
            given.optimizer_offload,
            colocated=given.delivery != "broadcast",
            awake=given.no_sleep,
        ),
    )


def bucket_megabytes(word: str | None, spare_gigabytes: float | None) -> int:
    """The size that the two options mean; with ``auto`` what a run would choose.

    Raises:
        ValueError: names option, value and remedy.
    """
    if word is None:
        return DEFAULT_MEGABYTES
    if word == AUTO and spare_gigabytes is not None:
        return auto_megabytes(int(spare_gigabytes * 2**30))
    if word == AUTO:
        raise ValueError(f"--bucket-mb {AUTO} is chosen from free memory; say how much that is with --spare-gb")
    if not word.isdecimal() or int(word) < 1:
        raise ValueError(f"--bucket-mb {word}: neither a whole number of MiB from 1 on nor {AUTO}; use 512")
    return int(word)


def plan(options: Options) -> dict[str, Any]:
    """What a sync would move, take and last, as plain values (docs/plan.md).

    Raises:
        ValueError: the model is not to be had, or cannot be shared out so; one line with a remedy.
    """
    from verl_sync_plugin.rollouts import ROLLOUTS, rollout_of

    model, trainer = read_model(options.model), options.trainer
    for name in ROLLOUTS:
        rollout_of(name).refuse_checkpoint(options.model)
    ways = choose(options.delivery, model, trainer.group, options.per_node, options.machine.param_offload)
    first, later, tensors = _deliveries(model, options, ways)
    held = moments(model, trainer, options.tp, first["staging_bytes"], later["staging_bytes"], options.machine)
    return {
        "model": options.model,
        "model_type": model.model_type,
        "tensors": tensors,
        "bytes": model.nbytes,
        "trainer": asdict(trainer),
        "rollout_tp": options.tp,
        "bucket_mb": options.megabytes,
        "deliveries": [first, later],
        "buckets_exact": trainer.kind != "megatron",  # which fuses tensors, and sends larger pieces
        "loading": {"text": ways.loading, "certain": ways.certain},
        "gpu_bytes": options.machine.gpu_bytes,
        "memory": [{"moment": each.name, "total": each.total, **_bytes_of(each)} for each in held],
        "seconds": _seconds(model, options, ways, tensors),
        "warnings": list(warnings_of(held, options.machine)),
    }


def _bytes_of(moment: Any) -> dict[str, int]:
    return {key: getattr(moment, key) for key in ("trainer", "staging", "weights", "kv")}


def _deliveries(model: Model, options: Options, ways: Ways) -> tuple[dict[str, Any], dict[str, Any], int]:
    from verl_sync_plugin.sync.sender import SLOTS, slot_limit

    made = plan_of(model, options.trainer, slot_limit(options.megabytes << 20), ways.sharded, ways.held)
    staged = {
        "bytes": made.nbytes,
        "buckets": len(made.buckets),
        "staging_bytes": min(SLOTS, len(made.buckets)) * made.slot_bytes,
    }
    in_place = {"bytes": model.nbytes, "buckets": 0, "staging_bytes": 0}
    first = {"when": "first sync", "name": ways.first, "why": "", **staged}
    rest = in_place if ways.later == "direct" else staged
    return first, {"when": "later syncs", "name": ways.later, "why": ways.why, **rest}, made.tensor_count


def _seconds(model: Model, options: Options, ways: Ways, tensors: int) -> dict[str, Any]:
    trainer = options.trainer
    alone = trainer.pp == 1 and trainer.ep == 1
    alike = links.share_alike(trainer.kind, trainer.group, options.tp, alone)
    widening = MASTER / 2 if trainer.kind != "megatron" else 1.0
    sizes = (model.nbytes, trainer.group, options.tp, alike, widening)
    moved = links.volume(*sizes, options.machine.param_offload, options.per_node)
    far = trainer.group > options.per_node and ways.later != "exchanged"
    link = "network" if far or ways.later == "broadcast" else options.link
    seconds = links.predict(ways.later, moved, tensors, link)
    around = links.AWAKE_SECONDS if options.machine.awake else links.AROUND_SECONDS
    used = links.used(ways.later, link, moved)
    return {
        "update_weights": seconds,
        "phase": [seconds + around[0], seconds + around[1]],
        "first": list(links.FIRST_SECONDS),
        "links": {name: asdict(links.LINKS[name]) for name in used},
    }
