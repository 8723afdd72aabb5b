# SPDX-License-Identifier: Apache-2.0
"""verl's SGLang adapter with the plugin's resharding phase."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter
from verl.workers.rollout.sglang_rollout.utils import lora_served_as_adapter

from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.rollouts.adapter import SyncAdapter


class SyncServerAdapter(SyncAdapter, ServerAdapter):
    """``SyncAdapter`` of SGLang."""

    stock = ServerAdapter
    rollout = rollout_of("sglang")

    @property
    def serves_adapter(self) -> bool:
        return bool(lora_served_as_adapter(self.model_config))

    def find_server(self) -> Any:
        return ray.get_actor(f"sglang_server_{self.replica_rank}_{self.node_rank}")
