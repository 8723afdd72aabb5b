"""The rollout adapter in every actor worker: verl's three calls of a sync become the sharding manager's phase.

verl calls ``resume(["weights"])``, ``update_weights(stream)``, offloads the trainer, lets all ranks meet in a barrier
and calls ``resume(["kv_cache"])``. The first resume is put off into ``update_weights``, where a failure can be agreed
on by all ranks; nothing needs the weights earlier.
"""

from __future__ import annotations

import json
import os
from typing import Any

import ray
import torch
from torch.distributed.device_mesh import DeviceMesh
from verl.utils.device import get_device_name
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter
from verl.workers.rollout.sglang_rollout.utils import lora_served_as_adapter

from verl_sync_plugin.config import TRAINERS, TURN_OFF, check_bucket_megabytes, refuse_unsupported, sync_config_of
from verl_sync_plugin.hooks import activation
from verl_sync_plugin.hooks.awake import WEIGHTS, sleep_tags, wake_stages
from verl_sync_plugin.hooks.backup import keep_cpu_backup
from verl_sync_plugin.hooks.endpoint import ServerActorEndpoint
from verl_sync_plugin.hooks.engine import ShardStream
from verl_sync_plugin.metrics import SyncReport
from verl_sync_plugin.sharding_manager import get_sharding_manager
from verl_sync_plugin.sharding_manager.base import ShardingManager

REPORT_FILE_VARIABLE = "VERL_SYNC_REPORT_FILE"


class SyncServerAdapter(ServerAdapter):
    """verl's SGLang adapter with the plugin's resharding phase.

    With ``custom.sync.enabled=False`` constructing it gives verl's own ``ServerAdapter``.
    """

    def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        enabled = sync_config_of(config).enabled
        activation.take_over(enabled)
        if enabled:
            return super().__new__(cls)
        _say("custom.sync.enabled=False: stock verl moves the weights")
        return ServerAdapter(config, *args, **kwargs)

    def __init__(self, config: Any, model_config: Any, device_mesh: DeviceMesh | None, replica_rank: int = -1) -> None:
        # verl's base class fills in device_mesh later, also for a disaggregated rollout: fix the role now
        self._colocated = device_mesh is not None
        if self._colocated:
            refuse_unsupported(config)
        super().__init__(config, model_config, device_mesh, replica_rank)
        self._sync = sync_config_of(config)
        self._manager: ShardingManager | None = None
        self._keeps_weights = lora_served_as_adapter(model_config)
        staged = bool(config.multi_stage_wake_up) or self._keeps_weights  # without resident weights no first stage
        self._stage_one, self._stage_two = wake_stages(staged, self._sync.release_cuda_graph)
        self._wake_tags: list[str] = []

    async def _init_server_adapter(self) -> None:
        """Finds the server actor. Replaces verl's, which builds an HTTP client that this path does not use."""
        if not self._colocated:
            await super()._init_server_adapter()
        elif not hasattr(self, "server_actor"):
            self.server_actor = ray.get_actor(f"sglang_server_{self.replica_rank}_{self.node_rank}")

    async def resume(self, tags: list[str]) -> None:
        """verl's stage calls: ``["weights"]`` is noted, ``["kv_cache"]`` ends the sync.

        Raises:
            SyncError: stage 2 failed on any rank; the same text on all.
        """
        if not self._colocated:
            await super().resume(tags)
        elif WEIGHTS in tags:
            self._wake_tags = list(self._stage_one)
        elif self._manager is not None:
            await self._finish(self._stage_two)

    async def release(self) -> None:
        """Puts the engine to sleep; harmless when it sleeps already."""
        if not self._colocated:
            await super().release()
            return
        await self._init_server_adapter()
        if self.config.free_cache_engine and self._is_server_tp_leader():
            await self.server_actor.release_tags.remote(
                sleep_tags(self._sync.release_cuda_graph, keep_weights=self._keeps_weights)
            )

    async def update_weights(self, weights: Any, global_steps: int | None = None, **kwargs: Any) -> None:
        """Moves the trainer's weights into the engine. Collective over all trainer ranks.

        Args:
            weights: the ``ShardStream`` of the plugin's engine.
            global_steps: verl's weight version.

        Raises:
            SyncError: any rank failed; the same text on every rank.
            ValueError: the stream comes from an engine without sharding manager.
        """
        if not self._colocated:
            _say("disaggregated rollout: verl's checkpoint engine and stock loading move the weights")
            await super().update_weights(weights, global_steps=global_steps, **kwargs)
            return
        if not isinstance(weights, ShardStream):
            raise ValueError(
                "the training engine exports a plain weight stream: no sharding manager knows it "
                f"(actor_rollout_ref.actor.strategy other than {', '.join(TRAINERS)}). Use one of these, or {TURN_OFF}."
            )
        await self._init_server_adapter()
        if self._manager is None:
            self._manager = self._make_manager(weights)
        await self._manager.update_weights(self._wake_tags, global_steps)
        self._wake_tags = []
        if not self.config.free_cache_engine:
            await self._finish([])

    def _make_manager(self, stream: ShardStream) -> ShardingManager:
        manager_class = get_sharding_manager(stream.trainer, str(self.config.name))
        megabytes = check_bucket_megabytes(
            self.config.get("update_weights_bucket_megabytes", None),
            self.config.checkpoint_engine.update_weights_bucket_megabytes,
        )
        backup = keep_cpu_backup(self._sync, self.config, self.model_config)
        restores = backup and not str(self.config.load_format).startswith("dummy")
        mesh = self.device_mesh["infer_tp"]
        endpoint = ServerActorEndpoint(self.server_actor, mesh, restores, self._sync.timeout_seconds)
        _say(
            f"actor rank {torch.distributed.get_rank()}: sharding manager {manager_class.__name__}, "
            f"buckets of {megabytes} MiB, engine's CPU backup {'on' if backup else 'off'}"
        )
        return manager_class(
            stream.engine, endpoint, self._sync, megabytes << 20, _trainer_device(), str(self.config.dtype)
        )

    async def _finish(self, tags: list[str]) -> None:
        manager = self._manager
        assert manager is not None
        report = await manager.finish(tags)
        if manager.endpoint.leader:
            _emit(report)


def _trainer_device() -> torch.device:
    name = get_device_name()
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def _emit(report: SyncReport) -> None:
    """One line into the log, and one JSON line into the file named by ``VERL_SYNC_REPORT_FILE``, if any."""
    _say(report.line())
    path = os.environ.get(REPORT_FILE_VARIABLE)
    if path:
        with open(path, "a") as file:
            file.write(json.dumps({"event": "sync_report", **report.as_dict()}) + "\n")


def _say(text: str) -> None:
    print(f"[verl-sync-plugin] pid {os.getpid()} {text}", flush=True)
