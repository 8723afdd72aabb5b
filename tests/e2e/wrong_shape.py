# SPDX-License-Identifier: Apache-2.0
"""Test-only module for VERL_USE_EXTERNAL_MODULES: from the fourth sync on the trainer describes a tensor wrongly.

SGLang's own ``load_weights`` refuses it in the scheduler, in the middle of the sync.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import wrapt

HONEST_SYNCS = 3
VICTIM = "model.layers.1.mlp.down_proj.weight"


def _transpose_later(fsdp2: ModuleType) -> None:
    honest = fsdp2.FSDP2Source.shards
    calls = 0

    def shards(self: Any) -> list[Any]:
        nonlocal calls
        calls += 1
        found = honest(self)
        return found if calls <= HONEST_SYNCS else [_transposed(shard) for shard in found]

    fsdp2.FSDP2Source.shards = shards


def _transposed(shard: Any) -> Any:
    views = tuple(replace(v, shape=v.shape[::-1]) if v.name == VICTIM else v for v in shard.base.views)
    return replace(shard, base=replace(shard.base, views=views))


wrapt.register_post_import_hook(_transpose_later, "verl_sync_plugin.trainers.fsdp2")
