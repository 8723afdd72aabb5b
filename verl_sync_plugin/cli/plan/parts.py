# SPDX-License-Identifier: Apache-2.0
"""Which trainer rank holds what, as bases of the plan: FSDP2 and FSDP exactly as verl shards, Megatron by its rules."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from math import lcm

from verl_sync_plugin.cli.plan.model import Model, Parameter
from verl_sync_plugin.layout.joint import plan_joint
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Base, Plan, View

DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}  # by size, which is all that matters here
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Trainer:
    """How a trainer shares out the model.

    Attributes:
        kind: ``fsdp2``, ``fsdp`` or ``megatron``.
        world: its ranks.
        tp, pp, ep, etp: Megatron's tensor, pipeline, expert and expert-tensor parallel sizes; 1 for FSDP.
    """

    kind: str
    world: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for name in ("world", "tp", "pp", "ep", "etp"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: must be at least 1")
        if self.kind != "megatron":
            if (self.tp, self.pp, self.ep) != (1, 1, 1):
                raise ValueError(f"--tp, --pp and --ep are Megatron's; use --trainer megatron, not {self.kind}")
        elif self.world % self.group:
            raise ValueError(
                f"--world {self.world}: no multiple of the {self.group} ranks that --tp {self.tp} --pp {self.pp} "
                f"--ep {self.ep} --etp {self.etp} need together; use for example --world {self.group}"
            )

    @property
    def group(self) -> int:
        """Ranks that together hold one whole model."""
        if self.kind != "megatron":
            return self.world
        return self.pp * lcm(self.tp, self.ep * self.etp)


def plan_of(model: Model, trainer: Trainer, slot_bytes: int, sharded: bool, held: int = 1) -> Plan:
    """The plan of a sync.

    Args:
        slot_bytes: bound on what a rank stages of one bucket.
        sharded, held: see ``layout.tensors.Plan``.

    Raises:
        ValueError: the model's tensors are computed, or the layers or experts are fewer than the ranks that share them.
    """
    if trainer.kind == "megatron":
        return plan_joint(tuple(_megatron(model, trainer)), slot_bytes, sharded, held)
    bases = _fsdp2(model, trainer.world) if trainer.kind == "fsdp2" else _fsdp1(model, trainer.world)
    return plan_buckets(tuple(bases), slot_bytes, sharded, held)


def _views(model: Model, parameter: Parameter, start: int) -> tuple[View, ...]:
    import torch

    from verl_sync_plugin.trainers.naming import hf_views, verl_rewrite

    dtype = getattr(torch, DTYPES[parameter.itemsize])
    return tuple(hf_views(parameter.name, parameter.shape, dtype, start, verl_rewrite(model.model_type)))


def _fsdp2(model: Model, world: int) -> list[Base]:
    from verl_sync_plugin.trainers.dtensors import even_chunks

    bases = []
    for each in model.parameters:
        rows = each.shape[0] if each.shape else 1
        lengths = even_chunks(rows, world, each.numel // rows) if world > 1 and each.shape else (each.numel,)
        bases.append(Base(each.name, DTYPES[each.itemsize], each.itemsize, lengths, _views(model, each, 0)))
    return bases


def _fsdp1(model: Model, world: int) -> list[Base]:
    """One flat parameter per wrapped module, cut evenly; what FSDP1 pads between parameters is left out."""
    units: dict[tuple[str, int], list[Parameter]] = defaultdict(list)
    for each in model.parameters:
        units[each.unit, each.itemsize].append(each)
    bases = []
    for (unit, itemsize), members in units.items():
        views: list[View] = []
        full = 0
        for each in members:
            views += _views(model, each, full)
            full += each.numel
        run = -(-full // world)
        lengths = tuple(max(min(run, full - rank * run), 0) for rank in range(world))
        bases.append(Base(unit or "root", DTYPES[itemsize], itemsize, lengths, tuple(views)))
    return bases


def _megatron(model: Model, trainer: Trainer) -> list[Base]:
    """Every HF tensor in even parts. Megatron fuses some of them (QKV, gate and up), which changes no size."""
    if model.layers < trainer.pp:
        raise ValueError(f"--pp {trainer.pp}: the model has only {model.layers} layers; use fewer stages")
    if trainer.ep > 1 and model.experts % trainer.ep:
        raise ValueError(f"--ep {trainer.ep}: does not divide the model's {model.experts} experts; use --ep 1")
    inner = trainer.group // trainer.pp
    load = [0] * trainer.group
    bases: list[Base] = []
    for each in model.parameters:
        for view in _views(model, each, 0):
            numel, parts = view.span if view.strides is None else _numel(view.shape), _parts(view, trainer)
            if numel % parts:
                parts = 1
            for part in range(parts):
                owner = _owner(view, part, parts, model, trainer, inner, load)
                load[owner] += numel // parts * each.itemsize
                lengths = tuple(numel // parts if rank == owner else 0 for rank in range(trainer.group))
                share = View(view.name, view.shape, 0, numel, None, (Run(0, part * numel // parts, numel // parts),))
                bases.append(Base(f"{view.name} {part}", DTYPES[each.itemsize], each.itemsize, lengths, (share,)))
    return bases


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _parts(view: View, trainer: Trainer) -> int:
    """Into how many parts tensor parallelism cuts a tensor; norms and routers are whole on every rank."""
    if len(view.shape) < 2 or view.name.endswith((".gate.weight", ".router.weight")):
        return 1
    return trainer.etp if _EXPERT.search(view.name) else trainer.tp


def _owner(view: View, part: int, parts: int, model: Model, trainer: Trainer, inner: int, load: list[int]) -> int:
    """The rank that sends a part: of those that hold it the one with the least to send."""
    layer, expert = _LAYER.search(view.name), _EXPERT.search(view.name)
    last = trainer.pp - 1
    stage = int(layer[1]) * trainer.pp // model.layers if layer else (0 if "embed" in view.name else last)
    stage = min(stage, last)
    ranks = range(stage * inner, (stage + 1) * inner)
    if expert:
        home = int(expert[1]) * trainer.ep // max(model.experts, 1)
        holders = [r for r in ranks if (r % inner) // trainer.etp % trainer.ep == home and r % trainer.etp == part]
    else:
        holders = [rank for rank in ranks if parts == 1 or rank % trainer.tp == part]
    return min(holders, key=lambda rank: (load[rank], rank))
