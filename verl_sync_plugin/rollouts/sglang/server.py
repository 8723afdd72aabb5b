# SPDX-License-Identifier: Apache-2.0
"""The rollout server actor: verl's own, plus our loader, idempotent sleep and wake, and one door for weight loads."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.sglang_rollout.utils import SGLANG_LORA_NAME

from verl_sync_plugin import compat
from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.log import say, say_unused
from verl_sync_plugin.lora.peft import unties_embeddings
from verl_sync_plugin.rollouts.sglang.arguments import ARGUMENTS, AT_LAUNCH, draft_of, refuse_arguments, resolved
from verl_sync_plugin.rollouts.sglang.awake import KV_CACHE, WEIGHTS, sleep_tags
from verl_sync_plugin.rollouts.sglang.backup import keep_cpu_backup
from verl_sync_plugin.rollouts.sglang.held_adapter import ask
from verl_sync_plugin.rollouts.sglang.pause import IDLE_SECONDS, PausingServer, end_requests, rest
from verl_sync_plugin.rollouts.sglang.request import ADAPTER_CHECK, hand_down, new_token
from verl_sync_plugin.rollouts.sglang.updates import WeightUpdates


class SyncSGLangHttpServer(WeightUpdates, PausingServer):
    """verl's SGLang server in hybrid and standalone mode, with the plugin's side of the resharding phase.

    Attributes:
        engine_token: what the loader knows this server's requests by; for an engine on several hosts
            ``rollouts/sglang/replica.py`` gives all its servers the same.
    """

    engine_token: ClassVar[str] = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.expect_updates(self._sync.timeout_seconds, self._gate.memory)
        self._report: dict[str, Any] | None = None
        self._processes: list[BaseProcess] = []
        self._served: list[str] | None = None  # names of factors for which SGLang has a place

    async def launch_server(
        self, master_address: str | None = None, master_port: int | None = None, **more: Any
    ) -> None:
        """Launches SGLang with our loader and with or without its host copy of the weights."""
        sglang_kwargs = self.config.engine_kwargs.get("sglang", None) or {}
        self.config.engine_kwargs["sglang"] = sglang_kwargs
        loaders = list(sglang_kwargs.get("custom_weight_loader", None) or [])
        ours = [self.loader, *([ADAPTER_CHECK] if self.lora_as_adapter else [])]
        sglang_kwargs["custom_weight_loader"] = [*loaders, *(each for each in ours if each not in loaders)]
        self._untie(sglang_kwargs)
        self._keep_draft(sglang_kwargs)
        hand_down(self.engine_token or new_token())
        backup = keep_cpu_backup(self.config, self.model_config)
        with compat.launch_shims(), _decided(self, backup):
            await super().launch_server(master_address=master_address, master_port=master_port, **more)
        # SGLang's schedulers and its detokenizer; what these start themselves, to compile kernels, comes and goes
        self._processes = multiprocessing.active_children()
        if self.node_rank == 0:
            refuse_arguments(resolved(self.tokenizer_manager), ARGUMENTS, TURN_OFF, AT_LAUNCH)
            launched = bool(self.tokenizer_manager.server_args.enable_weights_cpu_backup)
            if launched and not backup and self.rollout_mode == RolloutMode.HYBRID:
                raise RuntimeError(
                    f"SGLang keeps a CPU backup of its weights ({launched}) although the sync decided on {backup}; "
                    "this verl does not launch SGLang the way verl-sync-plugin expects"
                )
            self.guard_requests()
        word = "on" if backup else "off"
        say(f"rollout server: {self.loader}, CPU backup {word}, {len(self._processes)} processes of SGLang")

    def _untie(self, sglang_kwargs: dict[str, Any]) -> None:
        """Has SGLang untie embedding and head where a merged adapter changes one of them: a tied engine cannot hold
        both."""
        if not self.lora_as_adapter and unties_embeddings(self.model_config):
            given = json.loads(sglang_kwargs.get("json_model_override_args") or "{}")
            sglang_kwargs["json_model_override_args"] = json.dumps({**given, "tie_word_embeddings": False})
            say("rollout server: embedding and head untied")

    def _keep_draft(self, sglang_kwargs: dict[str, Any]) -> None:
        """Has SGLang load and keep the weights of a draft model, which no sync writes."""
        if draft := draft_of(sglang_kwargs):
            sglang_kwargs["enable_draft_weights_cpu_backup"] = True
            sglang_kwargs.setdefault("speculative_draft_load_format", "auto")  # else as the target: dummy, most often
            say(f"rollout server: the draft model {draft} keeps the weights of its checkpoint")

    async def sleep(self, **more: Any) -> None:
        """verl's sleep, once per wake; a repeated call is harmless.

        Raises:
            TimeoutError: SGLang did not answer in time; names the key.
        """
        say_unused("sleep", more)
        if self.node_rank == 0 and self.config.free_cache_engine:
            started = time.perf_counter()
            # what no sync resumes stays: an adapter's base, and the weights of a separate rollout
            keep = self.lora_as_adapter or self.separate
            await self.release_tags(sleep_tags(keep_weights=keep))
            self._sleep_seconds = time.perf_counter() - started

    async def release_kv_cache(self, **more: Any) -> None:
        """verl's call before a checkpoint-engine sync; requests that stay in the engine need the cache."""
        say_unused("release_kv_cache", more)
        if not self.keeps_requests and self.node_rank == 0 and self.config.free_cache_engine:
            await self.release_tags([KV_CACHE])

    async def resume_kv_cache(self, **more: Any) -> None:
        """verl's counterpart of ``release_kv_cache``; of ``sleep`` too, behind a sync of a separate rollout."""
        say_unused("resume_kv_cache", more)
        if self.node_rank == 0 and self.config.free_cache_engine:
            await self.resume_tags([KV_CACHE])
            await self._flush()

    async def wake_up(self, **more: Any) -> None:
        """verl's counterpart of ``sleep``.

        Raises:
            ValueError: as verl's, of a colocated engine of the actor, which wakes in the sync.
            TimeoutError: SGLang did not answer in time; names the key.
        """
        if self.rollout_mode == RolloutMode.HYBRID:
            await super().wake_up(**more)
            return
        say_unused("wake_up", more)
        if self.node_rank == 0:
            await self.resume_tags(sorted(self.occupation.state.released))
            await self._flush()

    async def load_adapter(
        self, settings: dict[str, Any], packed: bytes, sent: list[tuple[str, int, int]], weight_version: str | None
    ) -> float:
        """Replaces the adapter under verl's name for it, and sees that SGLang computes with all of it.

        Args:
            settings: ``served_lora.served_settings``.
            packed: ``served_lora.pack_adapter``.
            sent: ``held_adapter.summary`` of the same factors.
            weight_version: see ``load_weights``, as for the result.

        Raises:
            RuntimeError: SGLang refused the adapter.
            ValueError: it does not compute with all of it; names a module and the remedy.
        """
        await self.begin_load()
        self._version, self._flushing = weight_version, None
        if self._served != (names := [name for name, *_ in sent]):
            await ask(self._call_loader, "", sent)  # SGLang would refuse it in words about its rank
        await compat.replace_adapter(self.tokenizer_manager, SGLANG_LORA_NAME, settings, packed)
        await ask(self._call_loader, SGLANG_LORA_NAME, sent)
        self._served = names
        slept, self._sleep_seconds = self._sleep_seconds, 0.0
        return slept

    async def begin_load(self) -> None:
        """See ``PausingServer``. Into a colocated engine that is awake SGLang loads when all requests have ended.

        Raises:
            RuntimeError: some do not end, or the sync was given up meanwhile.
        """
        await super().begin_load()
        number = self._gate.number
        if not self.separate:
            await self._end_requests()
            self._gate.refuse_given_up(number)

    async def _release(self, tags: list[str]) -> None:
        """SGLang ends when it is to release memory while a request is running."""
        if WEIGHTS in tags:
            self._gate.lose_weights()
        await self._end_requests()
        await super()._release(tags)

    async def _end_requests(self) -> None:
        """verl has ended its own, and the gate is shut; what came over HTTP before that may still be inside."""
        if not self.guarded.busy or self.occupation.state.released:
            return
        if self.guarded.inside and not await end_requests(self.tokenizer_manager, IDLE_SECONDS):
            raise RuntimeError(
                f"{self.guarded.inside} requests did not end within {IDLE_SECONDS:g} s of being aborted, and SGLang "
                "can neither sleep nor load with them inside; look at what asks its HTTP port beside verl"
            )
        await rest(self.tokenizer_manager)

    async def finish_sync(self, tags: list[str]) -> None:
        """See ``WeightUpdates``; goes on where the load has paused."""
        await super().finish_sync(tags)
        if self.paused_by_load:
            if self.occupation.state.released:  # by a driver that has not paused
                await self.resume_kv_cache()
            await self.resume_generation()

    async def engine_alive(self) -> bool:
        """Whether every process that SGLang started here still runs."""
        return all(process.is_alive() for process in self._processes)

    async def put_sync_report(self, report: dict[str, Any]) -> None:
        """The leader's report of the last sync."""
        self._report = report

    async def take_sync_report(self) -> dict[str, Any] | None:
        """The report of the last sync, once."""
        report, self._report = self._report, None
        return report


@contextmanager
def _decided(server: PausingServer, backup: bool) -> Iterator[None]:
    """Context in which verl's launch takes the sync's decision on the CPU backup.

    verl takes no argument for it: it turns the copy on in hybrid mode and with LoRA. So a server that needs none is
    shown as standalone and, where LoRA is merged before the sync, without LoRA; the launch reads both for nothing else.
    """
    mode, model = server.rollout_mode, server.model_config
    if backup or mode != RolloutMode.HYBRID:
        yield
        return
    rank = model.lora_rank
    server.rollout_mode = RolloutMode.STANDALONE
    if not server.lora_as_adapter:
        object.__setattr__(model, "lora_rank", 0)  # the config is frozen
    try:
        yield
    finally:
        server.rollout_mode = mode
        object.__setattr__(model, "lora_rank", rank)
