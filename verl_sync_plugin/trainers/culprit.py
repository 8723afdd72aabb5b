# SPDX-License-Identifier: Apache-2.0
"""Which parameter made a bucket NaN or Inf; only ever run after a failure."""

from __future__ import annotations

import torch

from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.strided import Run, compose
from verl_sync_plugin.layout.tensors import Base, Bucket, View
from verl_sync_plugin.trainers.base import ParameterSource


def name_culprit(bucket: Bucket, shards: list[Shard], source: ParameterSource, rank: int) -> str | None:
    """A sentence that names the parameter, found in the trainer's own values; ``None``: none there.

    Args:
        bucket: what was packed.
        shards: all shards of this rank, by base index.
        source: asked for what goes into a merge beside the shards.
        rank: this rank's place among the owners of a sharded base.
    """
    merged = []
    for part in bucket.slices:
        shard = shards[part.base]
        try:
            run = shard.local()[part.begin : part.end]
        except KeyError:  # a stream's tensors are gone by now
            names = [view.name for each in bucket.slices for view in shards[each.base].base.views]
            return f"one of {names[:5]} holds NaN or Inf in the trainer"
        if not run.numel() or not run.is_floating_point():
            continue
        first = sum(shard.base.lengths[: rank if len(shard.base.lengths) > 1 else 0]) + part.begin
        if (where := _first(~run.isfinite())) is not None:
            return f"{_name(shard.base, first + where)!r} holds NaN or Inf in the trainer"
        wire = shard.base.dtype
        if (where := _first(~run.to(getattr(torch, wire)).isfinite())) is not None:
            return f"{_name(shard.base, first + where)!r} exceeds the range of {wire}, in which it travels"
        if shard.merge is not None:
            merged.append(part.base)
    if not merged:
        return None
    for suspect, values in source.merged_with(tuple(merged)):
        if not bool(values().isfinite().all()):
            return f"{suspect!r} holds NaN or Inf in the trainer"
    names = [view.name for base in merged for view in shards[base].base.views]
    return f"one of {names[:5]} is NaN or Inf once its adapter is merged"


def _first(flags: torch.Tensor) -> int | None:
    return int(flags.int().argmax()) if bool(flags.any()) else None


def _name(base: Base, element: int) -> str:
    return next((view.name for view in base.views if _holds(view, element)), base.key)


def _holds(view: View, element: int) -> bool:
    if not view.shares:
        return view.start <= element < view.start + view.span
    return any(compose(Run(element, element, 1), share) for share in view.shares)
