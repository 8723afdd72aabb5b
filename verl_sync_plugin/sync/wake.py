"""Awake: the engine resumes its weights while the trainer packs (stage 1), and the rest after the sync (stage 2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from verl_sync_plugin.config.bucket_size import AutoBucket
from verl_sync_plugin.log import say
from verl_sync_plugin.memory.gauges import note_device_memory
from verl_sync_plugin.report.sync_report import SyncReport
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.transport.agreement import Agreement


class Waking:
    """All methods but ``publish`` are collective over the trainer ranks.

    Args:
        agreement: where ranks settle.
        endpoint: the engine.
        device: whose memory is noted in the report.
    """

    def __init__(self, agreement: Agreement, endpoint: RolloutEndpoint, device: torch.device) -> None:
        self._agreement = agreement
        self._endpoint = endpoint
        self._device = device

    async def resume(self, tags: list[str], report: SyncReport, work: Callable[[], None] | None = None) -> None:
        """The leader has the engine resume ``tags`` while every rank does ``work``.

        Args:
            tags: memory tags, the same on all ranks.
            report: gets the seconds of ``work`` as ``update_weights``, and those beyond it as ``resume_weights``.
            work: may settle, and raise SyncError, on all ranks alike.

        Raises:
            SyncError: any engine failed, or ``work`` did. The engine has answered by then, so that the next sync finds
                it idle.
        """
        with self._agreement.attempt():
            note_device_memory(report, self._device, "asleep")
        before = report.stages.get("update_weights", 0.0)
        with report.stage("resume_weights"):
            waking: asyncio.Future[None] | None = None
            with self._agreement.attempt():
                if tags and self._endpoint.leader:
                    waking = asyncio.ensure_future(self._endpoint.resume(tags))
                    await asyncio.sleep(0)  # it sends its request here: work blocks this loop
            try:
                if work is not None:
                    with report.stage("update_weights"):
                        work()
            except BaseException:
                if waking is not None:
                    await asyncio.gather(waking, return_exceptions=True)
                raise
            with self._agreement.attempt():
                if waking is not None:
                    await waking
            self._agreement.settle("resuming the engine's weights")
        report.stages["resume_weights"] -= report.stages.get("update_weights", 0.0) - before
        with self._agreement.attempt():
            note_device_memory(report, self._device, "weights")

    async def finish(self, tags: list[str], report: SyncReport) -> None:
        """Stage 2: the engine resumes ``tags`` and flushes once.

        Raises:
            SyncError: any engine failed; the same text on every rank.
        """
        with report.stage("resume_kv"):
            with self._agreement.attempt():
                if self._endpoint.leader:
                    await self._endpoint.finish(tags)
            self._agreement.settle("resuming the engine's KV cache")
        with self._agreement.attempt():  # if this fails, the next sync does
            note_device_memory(report, self._device, "awake")

    async def publish(self, report: SyncReport) -> None:
        """The leader leaves the report with the engine; not collective."""
        if self._endpoint.leader:
            try:
                await self._endpoint.publish(report.as_dict())
            except Exception as error:  # the weights are in place; a lost report must not end the run
                say(f"the report of this sync is lost: {error!r}")

    async def choose_bucket(self, auto: AutoBucket, tags: list[str], report: SyncReport) -> int:
        """Resumes ``tags``; then all ranks measure and agree.

        Returns:
            The size of a bucket in bytes, the same on all ranks.
        """
        with self._agreement.attempt():
            auto.before_resume()
        await self.resume(tags, report)
        spare: int | None = None
        with self._agreement.attempt():
            spare = auto.spare(resumed=bool(tags))
        self._agreement.settle("measuring free device memory")
        return auto.agreed_bytes(self._agreement.gather("choosing a bucket size", spare))
