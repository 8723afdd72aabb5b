# SPDX-License-Identifier: Apache-2.0
"""SGLang as the plugin's hooks know it, without importing it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from verl_sync_plugin.rollouts.base import Rollout
from verl_sync_plugin.rollouts.sglang.arguments import refuse_keys
from verl_sync_plugin.rollouts.sglang.families import refuse_checkpoint, refuse_untied
from verl_sync_plugin.rollouts.sglang.served_lora import refuse_adapter


class SGLangRollout(Rollout):
    """verl's ``rollout.name=sglang``."""

    name = "sglang"
    engine = "SGLang"
    adapter = "verl_sync_plugin.rollouts.sglang.adapter.SyncServerAdapter"
    stock_adapter = "verl.workers.rollout.sglang_rollout.sglang_rollout.ServerAdapter"
    stock_loader = "_load_sglang"

    @staticmethod
    def load_replica() -> type:
        from verl.workers.rollout.replica import _load_sglang

        _load_sglang()  # verl's preparation of SGLang's imports comes first
        from verl_sync_plugin.rollouts.sglang.replica import SyncSGLangReplica

        return SyncSGLangReplica

    def refuse_keys(self, rollout: Any, moves: bool) -> None:
        refuse_keys(rollout, moves)

    def refuse_checkpoint(self, path: str) -> None:
        refuse_checkpoint(path)

    def refuse_untied(self, architectures: Iterable[str], where: str) -> None:
        refuse_untied(architectures, where)

    def refuse_adapter(self, settings: Mapping[str, Any], keys: Mapping[str, str]) -> None:
        refuse_adapter(settings, keys)
