# SPDX-License-Identifier: Apache-2.0
"""A real SGLang engine without verl's server actor: its loop, and the calls that a rollout endpoint makes of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from ports import free_port
from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.rollouts.sglang.request import LOADER, dumps
from verl_sync_plugin.rollouts.sglang.script_server import ScriptServer
from verl_sync_plugin.sync.endpoint import RolloutEndpoint

IDLE_SECONDS, CALL_SECONDS = 20.0, 240.0
DUMP, SPOIL = "bare_engine.loaders.dump", "bare_engine.loaders.spoil"
PLAIN = ("bare_engine.loaders.load", "bare_engine.loaders.load_and_forget_prefixes")


class BareEngine(ScriptServer):
    """``sgl.Engine`` on CPU, whose loop runs in a thread; methods of the plugin's server run in it.

    Attributes:
        abandoned: why syncs were given up.
        reports: of all syncs.
        flushed: of every sync that ended, whether the flush was asked for during the load.
    """

    def __init__(
        self, model_path: str, tp: int, load_format: str = "dummy", loaders: tuple[str, ...] = (), **more: Any
    ) -> None:
        self.tp = tp
        self.abandoned: list[str] = []
        self.reports: list[dict[str, Any]] = []
        self.flushed: list[bool] = []
        arguments = {
            "model_path": model_path, "tp_size": tp, "load_format": load_format,
            "custom_weight_loader": [LOADER, DUMP, SPOIL, *PLAIN, *loaders],
            "device": "cpu", "dtype": "bfloat16", "attention_backend": "torch_native",
            "sampling_backend": "pytorch", "grammar_backend": "none", "skip_tokenizer_init": True,
            "disable_cuda_graph": True, "disable_overlap_schedule": True, "max_total_tokens": 2048,
            "max_running_requests": 4, "mem_fraction_static": 0.1, "context_length": 256,
            "skip_server_warmup": True, "nccl_port": free_port(), "log_level": "error",
            "sleep_on_idle": True,  # a scheduler without work would keep a core busy
        }  # fmt: skip
        super().__init__({**arguments, **more}, 60.0, random_weights=False, keeps_copy=True)
        threading.Thread(target=self.engine.loop.run_forever, daemon=True).start()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.engine.loop)

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.start(coroutine).result(CALL_SECONDS)

    async def abandon_sync(self, why: str) -> None:
        self.abandoned.append(why)

    async def put_sync_report(self, report: dict[str, Any]) -> None:
        self.reports.append(report)

    async def finish_sync(self, tags: list[str]) -> None:
        self.flushed.append(self._flushing is not None)
        await super().finish_sync(tags)

    async def ask_loader(self, loader: str, given: str) -> None:
        """Has all ranks call a loader of the tests'."""
        await self._call_loader(loader, dumps([(given, torch.empty(0))]))

    def state(self, path: Path) -> list[dict[str, torch.Tensor]]:
        """Returns what every rank really holds."""
        self.call(self.ask_loader(DUMP, str(path)))
        return [torch.load(f"{path}.{rank}") for rank in range(self.tp)]

    def spoil_next(self, parameter: str) -> None:
        """Has the last rank flip a bit of a parameter after the copies of the next sync."""
        self.call(self.ask_loader(SPOIL, parameter))

    def load_from_disk(self, path: str) -> None:
        """SGLang's own way from a checkpoint into the running engine.

        It ends the scheduler when a request is still running, and an answered one may be for a moment.
        """
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        deadline, manager = time.monotonic() + IDLE_SECONDS, self.tokenizer_manager
        while not self.call(manager.flush_cache()).success and time.monotonic() < deadline:
            time.sleep(0.05)
        obj = UpdateWeightFromDiskReqInput(model_path=path, load_format="auto")
        success, message, *_ = self.call(manager.update_weights_from_disk(obj, None))
        assert success, message

    def generate(self, prompt: list[int], tokens: int, adapter: str | None = None) -> tuple[list[int], list[float]]:
        """Greedy token ids and their log-probabilities, with an adapter that the engine serves."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        named = {"lora_path": [adapter]} if adapter else {}
        (answer,) = self.call(
            self.engine.async_generate(input_ids=[prompt], sampling_params=sampling, return_logprob=True, **named)
        )
        return answer["output_ids"], [item[0] for item in answer["meta_info"]["output_token_logprobs"]]

    def shutdown(self) -> None:
        self.engine.shutdown()


def endpoint_of(engine: BareEngine | None, ranks: tuple[int, ...]) -> RolloutEndpoint:
    """The product's own; whoever has the engine leads, and ``ranks`` belong to it."""

    def call(method: str, *arguments: Any) -> Future[Any]:
        return engine.start(getattr(engine, method)(*arguments))  # type: ignore[union-attr]

    return RolloutEndpoint(rollout_of("sglang"), call if engine else None, ranks, timeout_seconds=60.0)
