"""verl's rollout server actor, as the sharding manager sees it."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from verl_sync_plugin.sharding_manager.endpoint import LoadOutcome, PendingLoad, RolloutEndpoint
from verl_sync_plugin.transport.protocol import LoadRequest


class ServerActorEndpoint(RolloutEndpoint):
    """One rank of the ``infer_tp`` mesh beside one ``SyncSGLangHttpServer``.

    Args:
        server: handle of the server actor; only the leader's is used.
        mesh: the ``infer_tp`` dimension of the rollout mesh.
        weights_cpu_backup: what the server was launched with.
    """

    def __init__(self, server: Any, mesh: DeviceMesh, weights_cpu_backup: bool) -> None:
        self._server = server
        self._mesh = mesh
        self._backup = weights_cpu_backup

    @property
    def leader(self) -> bool:
        return self._mesh.get_local_rank() == 0

    @property
    def weights_cpu_backup(self) -> bool:
        return self._backup

    def gather_addresses(self, address: str) -> tuple[str, ...]:
        addresses = [""] * self._mesh.size()
        dist.all_gather_object(addresses, address, group=self._mesh.get_group())
        return tuple(addresses)

    async def resume(self, tags: list[str]) -> None:
        await self._server.resume_tags.remote(tags)

    async def finish(self, tags: list[str]) -> None:
        """Stage 2: resumes ``tags`` and flushes the prefix cache once."""
        await self._server.finish_sync.remote(tags)

    async def publish(self, report: dict[str, Any]) -> None:
        """Leaves a report where the trainer fetches it."""
        await self._server.put_sync_report.remote(report)

    def start_load(self, request: LoadRequest, weight_version: str | None) -> PendingLoad:
        return _ActorLoad(self._server.load_weights.remote(request.to_wire(), weight_version))


class _ActorLoad(PendingLoad):
    def __init__(self, reference: ray.ObjectRef) -> None:
        self._reference = reference

    def finished(self) -> bool:
        ready, _ = ray.wait([self._reference], timeout=0)
        return bool(ready)

    async def outcome(self, timeout: float) -> LoadOutcome:
        sleep_seconds = await asyncio.wait_for(asyncio.wrap_future(self._reference.future()), timeout)
        return LoadOutcome(sleep_seconds=float(sleep_seconds))
