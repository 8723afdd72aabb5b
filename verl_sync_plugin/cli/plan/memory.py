# SPDX-License-Identifier: Apache-2.0
"""What a GPU holds at each moment of a step, from sizes alone. A prediction: activations are not in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl_sync_plugin.cli.plan.model import Model
from verl_sync_plugin.cli.plan.parts import Trainer

MASTER = 4  # bytes of an element that an optimizer steps in
ADAM = 8  # of its two moments
GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """The GPU and what is asked of it.

    Attributes:
        gpu_bytes: memory of one GPU; 0 when unknown.
        fraction: ``gpu_memory_utilization``, what of it the engine takes for weights and KV cache.
        reserve_bytes: CUDA contexts of both processes, NCCL's buffers, and activations of the engine.
        param_offload, optimizer_offload: the trainer keeps these in host memory outside a training step.
        colocated: trainer and rollout share GPUs.
        awake: the engine never sleeps (``free_cache_engine=False``).
    """

    gpu_bytes: int
    fraction: float
    reserve_bytes: int
    param_offload: bool = False
    optimizer_offload: bool = False
    colocated: bool = True
    awake: bool = False


@dataclass(frozen=True)
class Holding:
    """Bytes that a trainer rank holds."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def trainer_of(model: Model, trainer: Trainer) -> Holding:
    """What a trainer rank holds during a training step.

    FSDP keeps fp32 parameters, gradients and Adam's moments, all sharded over the world. Megatron keeps bf16
    parameters and fp32 gradient buffers of its part, and shares out fp32 masters and moments over the data-parallel
    ranks (verl's default).
    """
    if trainer.kind != "megatron":
        share = -(-model.numel // trainer.world)
        return Holding(share * MASTER, share * MASTER, share * ADAM)
    expert = sum(each.numel for each in model.parameters if ".experts." in each.name)
    dense = model.numel - expert
    held = -(-dense // (trainer.tp * trainer.pp)) + -(-expert // (trainer.ep * trainer.etp * trainer.pp))
    replicas = -(-model.numel // trainer.world)
    return Holding(held * 2, held * MASTER, replicas * (MASTER + ADAM))


def engine_weights(model: Model, tp: int) -> int:
    """Bytes of an engine rank's weights: matrices are cut by tensor parallelism, norms and biases are counted whole."""
    return sum(each.numel * each.itemsize // (tp if len(each.shape) > 1 else 1) for each in model.parameters)


@dataclass(frozen=True)
class Moment:
    """One moment of a step, and what lies on a GPU then, in bytes."""

    name: str
    trainer: int
    staging: int
    weights: int
    kv: int

    @property
    def total(self) -> int:
        return self.trainer + self.staging + self.weights + self.kv


def moments(model: Model, trainer: Trainer, tp: int, staging: int, later: int, machine: Machine) -> list[Moment]:
    """Peak memory of a GPU by moment. Where trainer and rollout are separate, trainer's and engine's GPUs apart.

    Args:
        tp: the rollout's tensor parallelism.
        staging: of the first sync, in bytes.
        later: of the syncs behind it; it stays where the engine never sleeps, and else where there is room.
    """
    holding, weights = trainer_of(model, trainer), engine_weights(model, tp)
    kv = max(int(machine.fraction * machine.gpu_bytes) - weights, 0)
    between = 0 if machine.param_offload else holding.parameters
    between += 0 if machine.optimizer_offload else holding.optimizer
    if trainer.kind == "megatron" and not machine.param_offload:
        between += holding.gradients  # its buffers stay; FSDP's gradients are freed after a step
    if not machine.colocated:
        return [
            Moment("trainer: training", holding.total, staging, 0, 0),
            Moment("rollout: sync", 0, staging, weights, kv),
        ]
    asleep, kept = ((weights, kv), later) if machine.awake else ((0, 0), 0)
    return [
        Moment("training", holding.total, kept, *asleep),
        Moment("first sync", between, staging, weights, kv if machine.awake else 0),
        Moment("later syncs", between, later, weights, kv if machine.awake else 0),
        Moment("rollout", between, kept, weights, kv),
    ]


def warnings_of(found: list[Moment], machine: Machine) -> Iterator[str]:
    """One line with a remedy per moment that does not fit; none where the GPU's memory is not given."""
    if not machine.gpu_bytes:
        return
    room = machine.gpu_bytes - machine.reserve_bytes
    engine = max((each.weights for each in found), default=0)
    if engine >= machine.fraction * machine.gpu_bytes:
        yield (
            f"the engine's weights ({engine / GIB:.1f} GiB) leave no room for its KV cache in --memory-fraction "
            f"{machine.fraction:g} of {machine.gpu_bytes / GIB:.0f} GiB: raise it, or --rollout-tp"
        )
    for each in found:
        if each.total > room:
            yield (
                f"OOM expected, {each.name}: {each.total / GIB:.1f} GiB of {room / GIB:.1f} GiB that are left beside a "
                f"reserve of {machine.reserve_bytes / GIB:g}: {_remedy(each, machine, room)}"
            )


def _remedy(moment: Moment, machine: Machine, room: int) -> str:
    fits = (room - moment.trainer - moment.staging) / machine.gpu_bytes
    if moment.kv and fits * machine.gpu_bytes > moment.weights:
        return f"--memory-fraction {int(fits * 100) / 100:g} or less (rollout.gpu_memory_utilization), or offload"
    if moment.trainer > room / 2:
        return "more trainer ranks, or offload: fsdp_config.param_offload and optimizer_offload (megatron.… likewise)"
    return "a larger --rollout-tp, or smaller buckets (--bucket-mb)"
