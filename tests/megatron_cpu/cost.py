# SPDX-License-Identifier: Apache-2.0
"""What a sync of a Megatron model takes in collectives and memory; module-level, for spawned processes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_cpu.engines import Layout, build
from megatron_cpu.stories import manager_of, one_sync
from verl_sync_plugin.sync.sender import SLOTS

COLLECTIVES = ("all_gather_object", "broadcast_object_list", "broadcast", "all_gather", "all_gather_into_tensor")


class Allocations(TorchDispatchMode):
    """Bytes of the largest storage that an operation inside has made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def of_third_sync(model_path: str, layout: Layout, bucket_bytes: int) -> tuple[dict[str, int], int, int, int]:
    """Of the third sync: (collectives by name, buckets, staging bytes, largest other allocation)."""
    engine = build(model_path, layout)
    manager = manager_of(engine, bucket_bytes, delivery="staged")
    one_sync(manager)
    one_sync(manager)
    with ExitStack() as stack:
        calls = {n: stack.enter_context(mock.patch.object(dist, n, wraps=getattr(dist, n))) for n in COLLECTIVES}
        sync, _ = manager.plan("third")
        plan = sync.plan
        manager.sender.begin(plan, sync.rank, hashed=False, finite=False)
        with Allocations() as allocations:
            for index in range(len(plan.buckets)):
                manager.sender.pack(index, index % SLOTS, sync.shards)
        assert manager.sender._staging is not None
        counts = {name: call.call_count for name, call in calls.items() if call.call_count}
        return counts, len(plan.buckets), manager.sender._staging.memory.numel(), allocations.largest
