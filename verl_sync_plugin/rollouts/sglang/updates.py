# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake, the load, and its end, for whoever holds SGLang's tokenizer manager: verl's rollout server actor
(``server``), or the process of a script's engine (``script_server``)."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.managers.io_struct import (
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)

from verl_sync_plugin import compat
from verl_sync_plugin.rollouts.gate import KV_CACHE, WEIGHTS, Occupation, WeightsGate
from verl_sync_plugin.rollouts.sglang.refusals import EXPERT_COUNTS
from verl_sync_plugin.rollouts.sglang.request import ADAPTER_CHECK, LOADER, pack_request


class WeightUpdates:
    """SGLang's side of the phase. Who mixes it in calls ``expect_updates``."""

    tokenizer_manager: Any
    global_steps: int | None = None  # version of the weights
    keeps_requests = False  # while its weights are synced
    loader = LOADER  # SGLang's ``load_format`` of a sync

    def expect_updates(self, timeout_seconds: float, needs_sync: bool) -> None:
        """Before all else; arguments of ``Occupation`` and ``WeightsGate``."""
        self._gate = WeightsGate(needs_sync)
        self.occupation = Occupation("SGLang", timeout_seconds, self._gate.memory)
        self._sleep_seconds = 0.0
        self._version: str | None = None
        self._flushing: asyncio.Future[bool] | None = None

    async def begin_load(self) -> None:
        """A load starts: the gate closes."""
        self._gate.begin()

    async def release_tags(self, tags: list[str]) -> None:
        """Releases what is still resident of ``tags``."""
        await self.occupation.change("release", tags, self._release)

    async def _release(self, tags: list[str]) -> None:
        if WEIGHTS in tags:
            self._gate.lose_weights()
        await self.tokenizer_manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags), None)

    async def resume_tags(self, tags: list[str]) -> None:
        """Resumes what is released of ``tags``; see ``Occupation``."""
        await self.occupation.change("resume", tags, self._resume)

    async def _resume(self, tags: list[str]) -> None:
        await self.tokenizer_manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None)

    async def wake(self, tags: list[str]) -> None:
        """Resumes what is released of ``tags``; once all is there, the prefix cache is flushed."""
        await self.resume_tags(tags)
        under_way, self._flushing = self._flushing, None
        if self._asleep or self.keeps_requests:  # SGLang flushes nothing while it has requests
            return
        if not await (under_way or compat.flush_cache(self.tokenizer_manager)):
            raise RuntimeError("SGLang could not flush its cache after the weight sync: requests are running")

    async def load_weights(self, request: tuple[Any, ...], weight_version: str | None) -> float:
        """Has every scheduler rank call our loader, and returns when all have left it: the seconds that the sleep
        before this sync took, 0.0 without one. ``request``: ``LoadRequest.to_wire()``; ``weight_version``: what SGLang
        and verl report once ``finish_sync`` ends this sync."""
        packed = pack_request(request)
        if WEIGHTS in self.occupation.released:
            raise RuntimeError("SGLang's weights are released, and nothing can be loaded into them: resume them first")
        await self.begin_load()
        self._version, self._flushing = weight_version, None
        await self._call_loader(self.loader, packed)
        slept, self._sleep_seconds = self._sleep_seconds, 0.0
        return slept

    async def _call_loader(self, loader: str, packed: bytes) -> None:
        """Has every scheduler rank call one of our functions with a packed request."""
        obj = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[packed] * int(self.tokenizer_manager.server_args.tp_size),
            load_format=loader,
            flush_cache=False,
            **compat.target_alone(UpdateWeightsFromTensorReqInput),
        )
        async with compat.weight_update_session(self.tokenizer_manager):
            success, message = await self.tokenizer_manager.update_weights_from_tensor(obj, None)
        if not success:
            raise RuntimeError(f"SGLang refused the weight update: {message}")

    async def ask_ranks(self, loader: str, *question: Any) -> list[Any]:
        """Calls a loader that loads nothing; returns what ranks on this host answered (``loader.answer``), by rank."""
        with tempfile.TemporaryDirectory(prefix="verl-sync-answers-") as folder:
            await self._call_loader(loader, pack_request((folder, *question)))
            answers = sorted(Path(folder).iterdir(), key=lambda path: int(path.name))
            return [json.loads(path.read_text(encoding="utf-8")) for path in answers]

    async def check_adapter(self, adapter: str, sent: list[tuple[str, int, int]]) -> None:
        """Has all ranks ``lora.compare_placed``. Raises ValueError, which names a module and the remedy."""
        answers = await self.ask_ranks(ADAPTER_CHECK, adapter, sent)
        if not answers:
            raise RuntimeError("SGLang did not answer what it holds of the adapter; see its log")
        if answers[0]:
            raise ValueError(answers[0])

    async def flush_after_load(self) -> None:
        """Has SGLang flush its prefix cache as soon as the load under way has ended, for ``finish_sync`` to find."""
        # Flushing while the KV cache is paused crashes SGLang (sglang #19029)
        if not (self._asleep or self.keeps_requests):
            self._flushing = asyncio.ensure_future(compat.flush_cache(self.tokenizer_manager))

    async def finish_sync(self, tags: list[str]) -> None:
        """Ends a committed sync: resumes ``tags``, flushes the prefix cache once, allows generation again. Raises
        RuntimeError where the sync was given up; the next one may be under way."""
        number, version = self._gate.number, self._version
        try:
            await self.wake(tags)
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
        return bool({KV_CACHE, WEIGHTS} & self.occupation.released)


def resolved(manager: Any) -> Callable[[str], Any]:
    """The values of a launched SGLang's arguments, by its tokenizer manager; of a dense model, none of what only
    experts heed."""
    model = getattr(manager, "model_config", None)
    config = getattr(model, "hf_config", None)
    text = getattr(config, "text_config", None) or config
    quantization = getattr(model, "quantization", None)  # by its checkpoint, too
    others = {"quantization": quantization} if quantization else {}
    if text is not None and not any(getattr(text, key, None) for key in EXPERT_COUNTS):
        others["moe_runner_backend"] = None
    return lambda key: others[key] if key in others else compat.argument(manager, key)
