# SPDX-License-Identifier: Apache-2.0
"""verl's SGLang server and replica with the plugin's side of the resharding phase.

verl aborts all requests of a separate replica before a sync and resumes generation after it; its clients ask again for
what was cut off. With ``custom.sync.pause`` SGLang gets another mode of pausing, with which requests stay in the
engine. What each mode keeps and costs: ``docs/design/pause.md``.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

import ray
from fastapi import HTTPException
from sglang.srt.managers.io_struct import PauseGenerationReqInput
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer, SGLangReplica
from verl.workers.rollout.sglang_rollout.utils import SGLANG_LORA_NAME

from verl_sync_plugin import compat
from verl_sync_plugin.config.settings import SEPARATE_BACKEND, TURN_OFF, sync_config_of
from verl_sync_plugin.errors import HalfWrittenError
from verl_sync_plugin.log import say, say_unused
from verl_sync_plugin.report import say_without_metrics
from verl_sync_plugin.rollouts.gate import KV_CACHE, WEIGHTS
from verl_sync_plugin.rollouts.sglang.refusals import (
    ARGUMENTS,
    AT_LAUNCH,
    IN_FP8,
    REFUSED,
    RETAIN_COPY,
    draft_of,
    keeps_copy,
    refuse_arguments,
)
from verl_sync_plugin.rollouts.sglang.request import ADAPTER_CHECK, FORGETTING_LOADER, LOADER, hand_down, new_token
from verl_sync_plugin.rollouts.sglang.updates import WeightUpdates, resolved
from verl_sync_plugin.transport.protocol import agreement_seconds

UNAVAILABLE = 503
# SGLang counts an answered request as running for one more scheduler step
REST_SECONDS, IDLE_SECONDS = 0.2, 20.0
ABORT_SECONDS, AGAIN_SECONDS, POLL_SECONDS = 1.0, 0.1, 0.002


class SyncSGLangHttpServer(WeightUpdates, SGLangHttpServer):
    """verl's SGLang server in hybrid and standalone mode, synced by the plugin; any other is verl's own
    (``SyncSGLangReplica``)."""

    engine_token: ClassVar[str] = ""  # by which the loader knows the servers of one engine
    rollout_mode: RolloutMode

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sync = sync_config_of(self.config)
        self.separate = self.rollout_mode == RolloutMode.STANDALONE  # it shares no GPU with the trainer
        self.pause = self._sync.pause if self.separate else "abort"
        self.keeps_requests = self.pause != "abort"
        # Retracted requests would find their prefixes of the weights before
        self.loader = FORGETTING_LOADER if self.pause == "retract" else LOADER
        # True while SGLang is paused; ``paused_by_load``: for a load alone, after which ``finish_sync`` resumes it
        self._paused = self.paused_by_load = False
        # In fp8 SGLang reads a checkpoint in bf16 without scales
        rubbish = self.config.quantization == "fp8" or str(self.config.load_format).startswith("dummy")
        self.expect_updates(self._sync.timeout_seconds, rubbish)
        self._report: dict[str, Any] | None = None
        self._processes: list[BaseProcess] = []
        self._served: list[str] | None = None  # names of factors for which SGLang has a place

    async def launch_server(
        self, master_address: str | None = None, master_port: int | None = None, **more: Any
    ) -> None:
        sglang_kwargs = self.config.engine_kwargs.get("sglang", None) or {}
        self.config.engine_kwargs["sglang"] = sglang_kwargs
        loaders = list(sglang_kwargs.get("custom_weight_loader", None) or [])
        ours = [self.loader, *([ADAPTER_CHECK] if self.lora_as_adapter else [])]
        sglang_kwargs["custom_weight_loader"] = [*loaders, *(each for each in ours if each not in loaders)]
        if draft := draft_of(sglang_kwargs):  # no sync writes its weights
            sglang_kwargs["enable_draft_weights_cpu_backup"] = True
            sglang_kwargs.setdefault("speculative_draft_load_format", "auto")  # else as the target: dummy, most often
            say(f"rollout server: the draft model {draft} keeps the weights of its checkpoint")
        hand_down(self.engine_token or new_token())
        architectures = getattr(self.model_config.hf_config, "architectures", None) or []
        # With an adapter verl insists on the copy; the weights stay resident then, so none is ever made
        backup = self.lora_as_adapter or keeps_copy(architectures, sglang_kwargs)
        if backup or draft:
            os.environ.setdefault(RETAIN_COPY, "1")
        with compat.launch_shims(), self._decided(backup):
            await super().launch_server(master_address=master_address, master_port=master_port, **more)
        # SGLang's schedulers and its detokenizer; what these start themselves, to compile kernels, comes and goes
        self._processes = multiprocessing.active_children()
        if self.node_rank == 0:
            rows = IN_FP8 if self.config.quantization == "fp8" else REFUSED
            refuse_arguments(resolved(self.tokenizer_manager), ARGUMENTS, TURN_OFF, AT_LAUNCH, rows)
            kept = bool(self.tokenizer_manager.server_args.enable_weights_cpu_backup)
            if kept and not backup and self.rollout_mode == RolloutMode.HYBRID:
                why = "this verl does not launch SGLang the way verl-sync-plugin expects"
                raise RuntimeError(f"SGLang keeps a CPU backup of its weights, against the sync's decision; {why}")
            self.guard_requests()
        copied = f"CPU backup {'on' if backup else 'off'}"
        say(f"rollout server: {self.loader}, {copied}, {len(self._processes)} processes of SGLang")

    @contextmanager
    def _decided(self, backup: bool) -> Iterator[None]:
        """Context in which verl's launch takes the sync's decision on the CPU backup, for which it has no argument: it
        turns the copy on in hybrid mode and with LoRA, and reads both for nothing else. So a server that needs none is
        shown as standalone and, where LoRA is merged before the sync, without LoRA."""
        mode, model, rank = self.rollout_mode, self.model_config, self.model_config.lora_rank
        if not backup and mode == RolloutMode.HYBRID:
            self.rollout_mode = RolloutMode.STANDALONE
            if not self.lora_as_adapter:
                object.__setattr__(model, "lora_rank", 0)  # the config is frozen
        try:
            yield
        finally:
            self.rollout_mode = mode
            object.__setattr__(model, "lora_rank", rank)

    # Requests

    def guard_requests(self) -> None:
        """Has every request to the tokenizer manager, from verl and over HTTP, wait until it may be computed. With
        ``in_place`` they share a cached prefix only if they began with the same weights: SGLang shares among requests
        of the same ``extra_key``."""
        manager = self.tokenizer_manager
        self._inside, self._ended = 0, -REST_SECONDS  # requests that SGLang has, and when it answered the last one
        self._generate, manager.generate_request = manager.generate_request, self._generate_request

    async def _generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """Hazard: nothing else may run between the end of ``enter`` and SGLang's call, or a sync could begin there."""
        try:
            await self._gate.enter()
        except HalfWrittenError as error:
            if request is None:
                raise
            raise HTTPException(UNAVAILABLE, str(error)) from error
        self._inside += 1
        try:
            if self.pause == "in_place" and hasattr(obj, "extra_key"):
                prefix, given = f"weights-{self._gate.number}:", obj.extra_key
                keys = [prefix + (key or "") for key in given] if isinstance(given, list) else prefix + (given or "")
                obj.extra_key = keys
            async with aclosing(self._generate(obj, request)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            self._inside -= 1
            self._ended = time.monotonic()

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """verl's generate, after the gate that SGLang's requests pass, too. A call that may span a sync names the
        version of the weights when it began, and when it ended, in the fields that verl's client fills in otherwise."""
        await self._gate.enter()
        began = self.global_steps
        output = await super().generate(*args, **kwargs)
        if self.keeps_requests and began is not None:
            fields = output.extra_fields
            fields.update(min_global_steps=began, max_global_steps=fields["global_steps"])
        return output

    async def abort_all_requests(self, **more: Any) -> None:
        """verl's call before a sync: aborts the requests, or pauses SGLang with them inside. SGLang handles requests to
        its scheduler in their order, so no forward pass begins between this and a load."""
        if self.node_rank != 0:
            return
        before = self._paused
        self._gate.hold()
        try:
            if self.keeps_requests:
                say_unused("abort_all_requests", more)
                await self.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=self.pause))
            else:
                await end_requests(self.tokenizer_manager)
                await super().abort_all_requests(**more)
        except BaseException:
            if not before:
                self._gate.let_go()
            raise
        self._paused, self.paused_by_load = True, False  # who calls this resumes, when all that it released is back

    async def resume_generation(self, **more: Any) -> None:
        """verl's counterpart of ``abort_all_requests``. Of a separate rollout it waits for the sync under way. Raises
        HalfWrittenError where that fails or does not end in time; requests that wait in SGLang stay there."""
        if self.separate:
            await self._gate.rest(agreement_seconds(self._sync.timeout_seconds))
        await super().resume_generation(**more)
        self._paused = self.paused_by_load = False
        self._gate.let_go()

    # Memory

    async def sleep(self, **more: Any) -> None:
        """verl's sleep; a repeated call is harmless."""
        say_unused("sleep", more)
        if self.node_rank == 0 and self.config.free_cache_engine:
            started = time.perf_counter()
            # What no sync resumes stays: an adapter's base, and the weights of a separate rollout
            await self.release_tags([KV_CACHE] if self.lora_as_adapter or self.separate else [KV_CACHE, WEIGHTS])
            self._sleep_seconds = time.perf_counter() - started

    async def release_kv_cache(self, **more: Any) -> None:
        """verl's call before a checkpoint-engine sync; requests that stay in the engine need the cache."""
        say_unused("release_kv_cache", more)
        if not self.keeps_requests and self.node_rank == 0 and self.config.free_cache_engine:
            await self.release_tags([KV_CACHE])

    async def resume_kv_cache(self, **more: Any) -> None:
        """verl's counterpart of ``release_kv_cache``; of ``sleep`` too, after a sync of a separate rollout."""
        say_unused("resume_kv_cache", more)
        if self.node_rank == 0 and self.config.free_cache_engine:
            await self.wake([KV_CACHE])

    async def wake_up(self, **more: Any) -> None:
        """verl's counterpart of ``sleep``; verl's own refuses it for a colocated engine, which wakes in the sync."""
        if self.rollout_mode == RolloutMode.HYBRID:
            await super().wake_up(**more)
            return
        say_unused("wake_up", more)
        if self.node_rank == 0:
            await self.wake(sorted(self.occupation.released))

    async def _release(self, tags: list[str]) -> None:
        """SGLang ends when it is to release memory while a request is running."""
        await self._end_requests()
        await super()._release(tags)

    async def _end_requests(self) -> None:
        """verl has ended its own, and the gate is shut; what came over HTTP before that may still be inside."""
        idle = not self._inside and time.monotonic() - self._ended >= REST_SECONDS
        if idle or self.occupation.released:
            return
        if self._inside and not await end_requests(self.tokenizer_manager, IDLE_SECONDS):
            why = "SGLang can neither sleep nor load while they run; find out what other than verl uses its HTTP port"
            late = f"{self._inside} requests did not end within {IDLE_SECONDS:g} s of being aborted"
            raise RuntimeError(f"{late}, and {why}")
        # Until it does not count an answered request as running any more
        deadline = time.monotonic() + IDLE_SECONDS
        while not await compat.flush_cache(self.tokenizer_manager):
            if time.monotonic() > deadline:
                raise RuntimeError("SGLang could not flush its cache: requests are still running")
            await asyncio.sleep(0.01)

    # Loads

    async def begin_load(self) -> None:
        """A load of weights starts: the gate closes, and what is cached from now on is of other weights.

        A separate rollout that its driver has not paused is paused until ``finish_sync``: that costs no longer than the
        load takes, and no round of verl's calls. After a failed sync it stays paused until one succeeds. Into a
        colocated engine that is awake SGLang loads when all requests have ended."""
        number = self._gate.begin()
        if not self.separate:
            await self._end_requests()
        elif not self._paused:
            await self.abort_all_requests()
            self.paused_by_load = True
        self._gate.refuse_given_up(number)

    async def load_adapter(
        self, settings: dict[str, Any], packed: bytes, sent: list[tuple[str, int, int]], weight_version: str | None
    ) -> float:
        """Replaces the adapter under verl's name for it, and sees that SGLang computes with all of it, or raises
        ValueError. Arguments of ``rollouts.sglang.pack_adapter``; version and result of ``load_weights``."""
        await self.begin_load()
        self._version, self._flushing = weight_version, None
        if self._served != (names := [name for name, *_ in sent]):
            await self.check_adapter("", sent)  # SGLang would refuse it in words about its rank
        await compat.replace_adapter(self.tokenizer_manager, SGLANG_LORA_NAME, settings, packed)
        await self.check_adapter(SGLANG_LORA_NAME, sent)
        self._served = names
        slept, self._sleep_seconds = self._sleep_seconds, 0.0
        return slept

    async def finish_sync(self, tags: list[str]) -> None:
        await super().finish_sync(tags)
        if self.paused_by_load:
            if self.occupation.released:  # by a driver that has not paused
                await self.resume_kv_cache()
            await self.resume_generation()

    async def engine_alive(self) -> bool:
        """True if every process that SGLang started here still runs."""
        return all(process.is_alive() for process in self._processes)

    async def put_sync_report(self, report: dict[str, Any]) -> None:
        """The leader's, for ``take_sync_report``."""
        self._report = report

    async def take_sync_report(self) -> dict[str, Any] | None:
        """The report of the last sync, once."""
        report, self._report = self._report, None
        return report


async def end_requests(tokenizer_manager: Any, seconds: float = ABORT_SECONDS) -> bool:
    """Aborts all requests and waits until they have ended; True if they have within ``seconds``. SGLang's own pause
    looks only once a second. What has not come to its scheduler yet (images that are read, the second of several
    responses) outlives an abort, so requests are aborted again."""
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


def server_of_one_engine() -> Any:
    """Our server class with a new token; verl makes an engine's servers on all hosts from one class."""
    return type("SyncSGLangHttpServer", (SyncSGLangHttpServer,), {"engine_token": new_token()})


class SyncSGLangReplica(SGLangReplica):
    """Uses our server for the actor's rollout. Reward and teacher models keep verl's, as do replicas whose weights come
    from one of verl's checkpoint engines, or that share a trainer's GPUs but not its weights."""

    server_class: Any
    # Calls that Ray lets into a server at a time: those of a sync must not wait for the requests that wait inside
    max_concurrency = 1_000_000

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.syncs_weights = not (self.is_reward_model or self.is_teacher_model) and sync_config_of(self.config).enabled
        if self.syncs_weights:
            self.server_class = ray.remote(server_of_one_engine())
            say(f"task runner: replica {self.replica_rank} is ours")

    async def init_hybrid(self, *args: Any, **kwargs: Any) -> Any:
        if self.syncs_weights:
            say_without_metrics()
        return await super().init_hybrid(*args, **kwargs)

    async def init_standalone(self, *args: Any, **kwargs: Any) -> Any:
        if self.config.checkpoint_engine.backend != SEPARATE_BACKEND:
            self._be_stock()
        return await super().init_standalone(*args, **kwargs)

    async def init_colocated(self, *args: Any, **kwargs: Any) -> Any:
        self._be_stock()
        return await super().init_colocated(*args, **kwargs)

    def _be_stock(self) -> None:
        self.syncs_weights = False
        self.server_class = ray.remote(SGLangHttpServer)
