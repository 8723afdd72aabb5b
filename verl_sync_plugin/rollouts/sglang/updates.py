# SPDX-License-Identifier: Apache-2.0
"""One door for weight loads: sleep and wake, the load, and its end, for whoever holds SGLang's tokenizer manager.

That is verl's rollout server actor (``server.py``), or the engine of a script (``local_server.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import (
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)

from verl_sync_plugin import compat
from verl_sync_plugin.rollouts.sglang.awake import KV_CACHE, WEIGHTS
from verl_sync_plugin.rollouts.sglang.complaints import complaints_of
from verl_sync_plugin.rollouts.sglang.gate import WeightsGate
from verl_sync_plugin.rollouts.sglang.occupation import Occupation
from verl_sync_plugin.rollouts.sglang.request import pack_request


class WeightUpdates:
    """SGLang's side of the phase, in the process of its tokenizer manager. Who mixes it in calls ``expect_updates``.

    Attributes:
        tokenizer_manager: SGLang's.
        global_steps: version of the weights; ``None`` before the first one with a version.
        keeps_requests: requests stay in the engine while its weights are synced.
        loader: SGLang's ``load_format`` of a sync.
        begin_load: called when a load starts; closes the gate.
        occupation: which memory of the engine is released.
    """

    tokenizer_manager: Any
    global_steps: int | None
    keeps_requests: Any
    loader: Any
    begin_load: Any
    _gate: WeightsGate

    def expect_updates(self, timeout_seconds: float, memory: Callable[[bool], None] = lambda there: None) -> None:
        """Before all else.

        Args:
            timeout_seconds: bound on SGLang's sleep and wake.
            memory: see ``Occupation``.
        """
        self.occupation = Occupation(timeout_seconds, memory)
        self._sleep_seconds = 0.0
        self._version: str | None = None
        self._flushing: asyncio.Future[Any] | None = None

    async def release_tags(self, tags: list[str]) -> None:
        """Releases what is still resident of ``tags``; see ``Occupation.release``."""
        await self.occupation.release(tags, self._release)

    async def _release(self, tags: list[str]) -> None:
        await self.tokenizer_manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags), None)

    async def resume_tags(self, tags: list[str]) -> None:
        """Resumes what is released of ``tags``; see ``Occupation.resume``."""
        manager = self.tokenizer_manager
        await self.occupation.resume(
            tags, lambda todo: manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=todo), None)
        )

    async def load_weights(self, request: tuple[Any, ...], weight_version: str | None) -> float:
        """Has every scheduler rank call our loader, and returns when all have left it.

        Args:
            request: ``LoadRequest.to_wire()``.
            weight_version: what SGLang and verl report once ``finish_sync`` ends this sync.

        Returns:
            Seconds the sleep before this sync took; 0.0 without one.

        Raises:
            RuntimeError: SGLang refused the update, or the server is not ready for one.
        """
        packed = pack_request(request)
        await self.begin_load()
        self._version, self._flushing = weight_version, None
        await self._call_loader(self.loader, packed)
        slept, self._sleep_seconds = self._sleep_seconds, 0.0
        return slept

    async def _call_loader(self, loader: str, packed: bytes) -> None:
        """Has every scheduler rank call one of our functions with a packed request.

        Raises:
            RuntimeError: SGLang refused it.
        """
        packs = [packed] * int(self.tokenizer_manager.server_args.tp_size)
        obj = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=packs,
            load_format=loader,
            flush_cache=False,
            **compat.target_alone(UpdateWeightsFromTensorReqInput),
        )
        async with compat.weight_update_session(self.tokenizer_manager):
            success, message = await self.tokenizer_manager.update_weights_from_tensor(obj, None)
        if not success:
            raise RuntimeError(f"SGLang refused the weight update: {message}")

    async def complaints(self, sync_id: str) -> list[str]:
        """Why engine ranks could not reach their trainer ranks in a sync, as far as they have said so."""
        return complaints_of(sync_id)

    async def flush_behind_load(self) -> None:
        """Has SGLang flush its prefix cache as soon as the load under way has ended, for ``finish_sync`` to find."""
        # Flushing while the KV cache is paused crashes SGLang (sglang #19029)
        if not (self._asleep or self.keeps_requests):
            self._flushing = asyncio.ensure_future(self.tokenizer_manager.flush_cache())

    async def finish_sync(self, tags: list[str]) -> None:
        """Ends a committed sync: resumes ``tags``, flushes the prefix cache once, allows generation again.

        Raises:
            RuntimeError: the cache cannot be flushed because requests are running, or the sync was given up; the next
                one may be under way.
        """
        number, version = self._gate.number, self._version
        try:
            await self.resume_tags(tags)
            await self._flush()
        except BaseException as error:
            self._gate.fail(f"waking up after the sync failed: {error}", number)
            raise
        self._gate.refuse_given_up(number)
        if version is not None:
            await compat.set_weight_version(self.tokenizer_manager, version)
            self.global_steps = int(version)
        self._gate.succeed(number)

    async def abandon_sync(self, why: str) -> None:
        """The trainer gave a sync up: nothing is generated until a later one succeeds."""
        self._gate.fail(why)

    @property
    def _asleep(self) -> bool:
        return bool({KV_CACHE, WEIGHTS} & self.occupation.state.released)

    async def _flush(self) -> None:
        under_way, self._flushing = self._flushing, None
        if self._asleep or self.keeps_requests:  # SGLang flushes nothing while it has requests
            return
        flushed = await (under_way or self.tokenizer_manager.flush_cache())
        if not getattr(flushed, "success", True):
            raise RuntimeError("SGLang could not flush its cache after the weight sync: requests are running")
