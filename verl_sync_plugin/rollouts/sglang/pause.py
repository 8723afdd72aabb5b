# SPDX-License-Identifier: Apache-2.0
"""What becomes of the requests in flight while the weights of a separate rollout are synced: ``custom.sync.pause``.

verl aborts all requests of every replica before a sync and resumes generation behind it; its clients ask again for
what was cut off. Here the server hands SGLang another mode of pausing, with which requests stay in the engine. What
each mode keeps and costs: ``docs/design/pause.md``.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from sglang.srt.managers.io_struct import PauseGenerationReqInput
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from verl_sync_plugin import compat
from verl_sync_plugin.config.settings import SEPARATE_BACKEND, sync_config_of
from verl_sync_plugin.log import say_unused
from verl_sync_plugin.rollouts.sglang.admission import Guarded
from verl_sync_plugin.rollouts.sglang.gate import WeightsGate
from verl_sync_plugin.rollouts.sglang.request import FORGETTING_LOADER, LOADER
from verl_sync_plugin.transport.agreement import together_seconds

ABORT_SECONDS = 1.0
IDLE_SECONDS = 20.0
POLL_SECONDS, AGAIN_SECONDS = 0.002, 0.1


class PausingServer(SGLangHttpServer):
    """verl's server with the gate before generation, and ``custom.sync.pause`` where the rollout is separate.

    In hybrid mode verl aborts requests to put an engine to sleep; all that is added there is that it takes no second.

    Attributes:
        separate: the rollout shares no GPU with the trainer, and the plugin syncs it.
        pause: SGLang's mode of pausing; ``abort`` unless ``separate``.
        paused_by_load: SGLang is paused for a load alone; nobody else is going to resume it.
        guarded: the requests of SGLang's that the gate stands before.
    """

    guarded: Guarded

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sync = sync_config_of(self.config)
        backend = self.config.checkpoint_engine.backend
        self.separate = self.rollout_mode == RolloutMode.STANDALONE and backend == SEPARATE_BACKEND
        synced = self.separate or self.rollout_mode == RolloutMode.HYBRID
        self._gate = WeightsGate(needs_sync=self._sync.enabled and synced)
        self.pause = self._sync.pause if self.separate else "abort"
        self._loads = 0
        self._paused = self.paused_by_load = False  # when SGLang was asked to

    @property
    def keeps_requests(self) -> bool:
        """Whether requests stay in the engine while its weights are synced."""
        return self.pause != "abort"

    @property
    def loader(self) -> str:
        """SGLang's ``load_format`` of a sync. Prefixes of retracted requests would be found again behind it."""
        return FORGETTING_LOADER if self.pause == "retract" else LOADER

    async def begin_load(self) -> None:
        """A load of weights starts: the gate closes, what is cached from now on is of other weights, and a separate
        rollout that its driver has not paused is paused until ``finish_sync``. After a failed sync it stays paused
        until one succeeds.

        Who pauses only here pauses for no longer than the load takes, and needs no round of verl's calls for it.

        Raises:
            RuntimeError: the sync was given up while requests were still coming to their end.
        """
        number = self._gate.begin()
        self._loads += 1
        if self.separate and not self._paused:
            await self.abort_all_requests()
            self.paused_by_load = True
            self._gate.refuse_given_up(number)

    def guard_requests(self) -> None:
        """Has SGLang's requests, from verl as over HTTP, wait until they may be computed. Where they may span a sync,
        every answer tells of which weights it is; with ``in_place``, requests share cached prefixes only with those
        that began with the same weights."""
        apart = self.pause == "in_place"
        self.guarded = Guarded(
            self.tokenizer_manager,
            self._admit,
            spans=self.keeps_requests and not compat.counts_versions(self.tokenizer_manager),
            name=lambda: f"weights-{self._loads}:" if apart else "",
        )

    async def _admit(self) -> None:
        """Waits until a request may be computed: the engine has had its first sync where it needs one, none is under
        way, and its memory is there.

        Raises:
            HalfWrittenError: the last sync failed, or the first one does not come.
        """
        await self._gate.first_sync(together_seconds(self._sync.timeout_seconds))
        await self._gate.enter()

    async def abort_all_requests(self, **more: Any) -> None:
        """verl's call before a sync: aborts the requests, or pauses SGLang with them inside.

        SGLang handles requests to its scheduler in their order and runs no forward pass while paused, so a load that
        is asked for behind this finds none under way.
        """
        if self.node_rank == 0 and (self.separate or self.rollout_mode == RolloutMode.HYBRID):
            self._gate.hold()
        try:
            if self.keeps_requests and self.node_rank == 0:
                say_unused("abort_all_requests", more)
                await self.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=self.pause))
            elif not self.keeps_requests:
                if self.node_rank == 0 and (self.separate or self.rollout_mode == RolloutMode.HYBRID):
                    await end_requests(self.tokenizer_manager)
                await super().abort_all_requests(**more)
        except BaseException:
            self._gate.let_go()
            raise
        self._paused, self.paused_by_load = True, False  # who calls this resumes, when all that it released is back

    async def resume_generation(self, **more: Any) -> None:
        """verl's counterpart of ``abort_all_requests``. Of a separate rollout it waits for the sync under way.

        Raises:
            HalfWrittenError: the last sync of a separate rollout failed, or the one under way has not ended for as long
                as ranks wait for each other; requests that wait in SGLang stay there.
        """
        if self.separate:
            await self._gate.rest(together_seconds(self._sync.timeout_seconds))
        await super().resume_generation(**more)
        self._paused = self.paused_by_load = False
        self._gate.let_go()

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """verl's generate, behind the gate that stands before SGLang's requests, too.

        A call that may span a sync says so in the fields that verl's client fills in otherwise: the version of the
        weights when it began, and when it ended.
        """
        await self._admit()
        began = self.global_steps
        output = await super().generate(*args, **kwargs)
        if self.keeps_requests and began is not None:
            fields = output.extra_fields
            fields.update(min_global_steps=began, max_global_steps=fields["global_steps"])
        return output


async def end_requests(tokenizer_manager: Any, seconds: float = ABORT_SECONDS) -> bool:
    """Aborts all requests and waits until they have ended; whether they have within ``seconds``.

    SGLang's own pause does so, too, but looks only once a second whether they have: with any request in flight it
    takes a second, where requests end within a step of the engine. What has not come to SGLang's scheduler yet (images
    that are read, the second of several responses) outlives an abort, so they are aborted again.
    """
    end = again = time.monotonic()
    end += seconds
    while True:
        if time.monotonic() >= again:
            tokenizer_manager.abort_request(abort_all=True)
            again += AGAIN_SECONDS
        if not await compat.answering(tokenizer_manager):
            return True
        if time.monotonic() > end:
            return False
        await asyncio.sleep(POLL_SECONDS)


async def rest(manager: Any) -> None:
    """Waits until SGLang flushes: for a moment it still counts a request that it has answered as running. Then
    ``finish_sync`` would take that for somebody's, and SGLang would end if it were put to sleep."""
    deadline = time.monotonic() + IDLE_SECONDS
    while not getattr(await manager.flush_cache(), "success", True):
        if time.monotonic() > deadline:
            raise RuntimeError("SGLang could not flush its cache: requests are still running")
        await asyncio.sleep(0.01)
