# SPDX-License-Identifier: Apache-2.0
"""The first sync of a run in which the engine keeps some weights in a wider dtype than ``rollout.dtype``: the trainer
hears of it before anything is loaded, and sends those unrounded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import one_process
import pytest
import torch
from one_process import OneProcess
from worlds import run_world

from verl_sync_plugin.layout.tensors import Base, Shard, View
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.trainers.base import ParameterSource, TrainerBackend, dtype_name


class Model(one_process.Model):
    """Keeps ``a`` in bf16, ``b`` in fp32, and adds one to ``c``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = (torch.nn.Parameter(p.bfloat16(), requires_grad=False) for p in (self.a, self.c))

    def load_weights(self, weights: Any) -> None:
        super().load_weights((name, tensor + 1 if name.startswith("c") else tensor) for name, tensor in weights)

    def as_loaded(self, weights: dict[str, torch.Tensor]) -> bool:
        own = Model()
        own.load_weights(weights.items())
        return all(map(torch.equal, (self.a, self.b, self.c), (own.a, own.b, own.c)))


class Trainer(TrainerBackend):
    """Of a ``Source``, which says the dtypes of the policy."""

    def open_source(self) -> ParameterSource:
        self.engine.policy = self.policy
        return self.engine  # type: ignore[no-any-return]


class Source(one_process.Source):
    policy: Any

    def _shard(self, name: str, tensor: torch.Tensor) -> Shard:
        wire = self.policy.of_parameter([name], tensor.dtype)
        view = View(name, tuple(tensor.shape), 0, tensor.numel())
        return Shard(Base(name, dtype_name(wire), wire.itemsize, (tensor.numel(),), (view,)), lambda: tensor.view(-1))


class Manager(ShardingManager):
    backend = Trainer


def sync_three_times(checkpoint: str, folder: str) -> dict[str, str]:
    """The dtypes that travel in the end."""
    os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1", CUDA_VISIBLE_DEVICES="")
    with pytest.MonkeyPatch.context() as patch:  # this process may be that of other tests
        for kind in (Model, Source, Manager):
            patch.setattr(one_process, kind.__name__, kind)
        place = OneProcess(checkpoint, Path(folder), verify="always")
    for _ in range(3):
        place.sync()
        assert place.model.as_loaded(place.source.weights)
        assert place.request() == "an answer"
        for tensor in place.source.weights.values():
            tensor.add_(torch.randn_like(tensor))
    planned = place.manager.planned
    place.close()
    return {base.key: base.dtype for base in planned.bases}


def test_what_the_engine_keeps_wider_travels_wider(tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    (dtypes,) = run_world(1, sync_three_times, tiny_model("qwen2"), str(tmp_path))
    assert dtypes == {"a.weight": "bfloat16", "b.weight": "float32", "c.q.weight": "float32", "c.k.weight": "float32"}
