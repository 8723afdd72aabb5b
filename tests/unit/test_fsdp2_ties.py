# SPDX-License-Identifier: Apache-2.0
"""Which names share a storage is seen in every sync, although a source looks closely only when something changed."""

from __future__ import annotations

import torch

from verl_sync_plugin.layout.tensors import Shard
from verl_sync_plugin.trainers.base import WirePolicy
from verl_sync_plugin.trainers.fsdp2 import FSDP2Source
from verl_sync_plugin.trainers.naming import verl_rewrite


def names_of(shards: list[Shard]) -> list[list[str]]:
    return [[view.name for view in shard.base.views] for shard in shards]


def three() -> torch.nn.Module:
    return torch.nn.ModuleDict({name: torch.nn.Linear(3, 3, bias=False) for name in "abc"})


def test_ties_made_and_undone_between_syncs() -> None:
    module = three()
    source = FSDP2Source(module, WirePolicy(torch.bfloat16), verl_rewrite("qwen2"))
    apart = [["a.weight"], ["b.weight"], ["c.weight"]]
    first = source.shards()
    assert names_of(first) == apart
    again = source.shards()
    assert all(one.base is other.base for one, other in zip(first, again, strict=True)), "described anew"
    module["c"].weight = module["a"].weight
    assert names_of(source.shards()) == [["a.weight", "c.weight"], ["b.weight"]]
    module["c"].weight = torch.nn.Parameter(torch.ones(3, 3))
    assert names_of(source.shards()) == apart
    module["b"].weight = torch.nn.Parameter(module["c"].weight.detach())  # one storage, two parameters
    assert names_of(source.shards()) == [["a.weight"], ["b.weight", "c.weight"]]


def test_a_parameter_that_was_replaced_is_read_where_it_is() -> None:
    module = three()
    source = FSDP2Source(module, WirePolicy(torch.bfloat16), verl_rewrite("qwen2"))
    source.shards()
    module["b"].weight = torch.nn.Parameter(torch.full((3, 3), 2.0))
    _, shard, _ = source.shards()
    assert shard.run is not None and shard.local().data_ptr() == shard.run.data_ptr() == module["b"].weight.data_ptr()
    assert not shard.run.requires_grad and bool((shard.local() == 2).all())
