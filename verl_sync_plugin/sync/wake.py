# SPDX-License-Identifier: Apache-2.0
"""Awake: the engine resumes its weights while the trainer packs (stage 1), and the rest after the sync (stage 2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from verl_sync_plugin.log import say
from verl_sync_plugin.memory import note_device_memory
from verl_sync_plugin.report import SyncReport
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

    async def resume(self, tags: list[str], report: SyncReport, meanwhile: Callable[[], None] | None = None) -> None:
        """The leader has the engine resume ``tags`` while every rank does something else.

        Args:
            tags: memory tags, the same on all ranks; none when the engine is awake.
            report: gets the seconds of ``meanwhile`` as ``update_weights``, and those beyond as ``resume_weights``.
            meanwhile: may settle, and raise SyncError, on all ranks alike.

        A failed engine is heard of when the ranks settle next. It has answered by then, so that the next sync finds it
        idle.
        """
        if not tags:
            if meanwhile is not None:
                with report.stage("update_weights"):
                    meanwhile()
            return
        with self._agreement.attempt():
            note_device_memory(report, self._device, "asleep")
        before = report.stages.get("update_weights", 0.0)
        with report.stage("resume_weights"):
            waking = await self._asked(tags)
            try:
                if meanwhile is not None:
                    with report.stage("update_weights"):
                        meanwhile()
            except BaseException:
                await asyncio.gather(waking, return_exceptions=True)
                raise
            with self._agreement.attempt():  # also on a rank that has failed: the engine is idle when this returns
                await waking
        report.stages["resume_weights"] -= report.stages.get("update_weights", 0.0) - before

    async def _asked(self, tags: list[str]) -> asyncio.Future[None]:
        """The engine's answer; on a rank that does not speak for it one that is there already."""
        waking: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waking.set_result(None)
        with self._agreement.attempt():
            if self._endpoint.leader:
                waking = asyncio.ensure_future(self._endpoint.resume(tags))
                await asyncio.sleep(0)  # it sends its request here: what the caller does next blocks this loop
        return waking

    async def finish(self, tags: list[str], report: SyncReport) -> None:
        """Stage 2: the engine resumes ``tags`` and flushes once.

        Raises:
            SyncError: any engine failed; the same text on every rank.
        """
        with report.stage("resume_kv"):
            with self._agreement.attempt():  # also on a rank that has failed: else the engine's gate stayed shut
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
