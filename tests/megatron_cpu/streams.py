# SPDX-License-Identifier: Apache-2.0
"""What the ranks do where a model goes through Megatron-Bridge's own stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_cpu.engines import Layout, build, stock_export, train_step
from megatron_cpu.stories import LARGE, TINY, check_same, manager_of, one_sync
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.trainers import shard_stream
from verl_sync_plugin.trainers.megatron.stream import StreamSource

STEPS = 3


def _norms_are_computed() -> Any:
    """A bridge whose norms are centered at zero in Megatron, as Gemma's are: their conversion adds one."""
    from megatron.bridge.models.conversion.param_mapping import ReplicatedMapping

    stock = ReplicatedMapping.megatron_to_hf

    def plus_one(self: Any, weights: torch.Tensor | None, module: Any) -> dict[str, torch.Tensor]:
        return {name: tensor + 1 for name, tensor in stock(self, weights, module).items()}

    return mock.patch.object(ReplicatedMapping, "megatron_to_hf", plus_one)


def computed(model_path: str, layout: Layout) -> None:
    """A model whose conversion computes: bit for bit the bridge's export, three times, with two bucket sizes."""
    engine = build(model_path, layout)
    shard_stream.take_over(True)  # as verl's worker does: the engine hands out its stream unconsumed
    with _norms_are_computed():
        for size in (TINY, LARGE):
            manager, keys = manager_of(engine, size), []
            for step in range(STEPS):
                if step:
                    train_step(engine)
                check_same(one_sync(manager), stock_export(engine))
                assert isinstance(manager.source, StreamSource), "a computed norm was taken for a copy"
                dist.barrier()
                store = distributed_c10d._get_default_store()
                keys.append(sorted(key for key in store.list_keys() if "verl_sync_plugin" in key))
            assert len(keys[1]) == len(keys[2]) < 10 + len(keys[0]), f"meetings leave keys in the store: {keys[2]}"


def _failing_once(fails: Callable[[], bool]) -> Any:
    """The bridge's row-parallel mappings raise on this rank when told to."""
    from megatron.bridge.models.conversion.param_mapping import RowParallelMapping

    stock = RowParallelMapping.megatron_to_hf

    def convert(self: Any, weights: torch.Tensor | None, module: Any) -> dict[str, torch.Tensor]:
        if fails():
            raise RuntimeError("injected into the conversion")
        return stock(self, weights, module)

    return mock.patch.object(RowParallelMapping, "megatron_to_hf", convert)


def failing(model_path: str, layout: Layout, bucket_bytes: int, learning: bool) -> tuple[str, float]:
    """The last rank fails inside the stream: everyone's error, its seconds; then all is well.

    Args:
        learning: in the first sync, at the last of the conversions in which it can, when others may have come to the
            end of what is learnt; else in the second sync, early.
    """
    engine = build(model_path, layout)
    shard_stream.take_over(True)
    manager = manager_of(engine, bucket_bytes)
    odd, calls = dist.get_rank() == dist.get_world_size() - 1, []
    last = 2 * engine.model_config.hf_config.num_hidden_layers  # two row-parallel weights in each layer
    with _norms_are_computed():
        if not learning:
            check_same(one_sync(manager), stock_export(engine))
            train_step(engine)
        text, started = "", time.monotonic()
        with _failing_once(lambda: odd and (calls.append(1) or len(calls) == (last if learning else 3))):
            try:
                one_sync(manager)
            except SyncError as error:
                text = str(error)
        seconds = time.monotonic() - started
        for _ in range(2):
            check_same(one_sync(manager), stock_export(engine))
            train_step(engine)
    return text, seconds
