# SPDX-License-Identifier: Apache-2.0
"""A real SGLang engine without verl's server actor: its loop, and the calls that a rollout endpoint makes of it."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ports import free_port
from verl_sync_plugin.rollouts.sglang.request import LOADER, dumps
from verl_sync_plugin.rollouts.sglang.script_server import ScriptServer

IDLE_SECONDS, CALL_SECONDS = 20.0, 240.0
DUMP = "bare_engine.loaders.dump"
PLAIN = ("bare_engine.loaders.load", "bare_engine.loaders.load_and_forget_prefixes")


class BareEngine(ScriptServer):
    """Runs ``sgl.Engine`` on a CPU; its loop, and methods of the plugin's server, run in a thread."""

    def __init__(
        self, model_path: str, tp: int, load_format: str = "dummy", loaders: tuple[str, ...] = (), **more: Any
    ) -> None:
        self.tp = tp
        self.abandoned: list[str] = []  # why syncs were given up
        self.reports: list[dict[str, Any]] = []
        self.flushed: list[bool] = []  # of every sync, whether the flush was asked for during the load
        arguments = {
            "model_path": model_path, "tp_size": tp, "load_format": load_format,
            "custom_weight_loader": [LOADER, DUMP, *PLAIN, *loaders],
            "device": "cpu", "dtype": "bfloat16", "attention_backend": "torch_native",
            "sampling_backend": "pytorch", "grammar_backend": "none", "skip_tokenizer_init": True,
            "disable_cuda_graph": True, "disable_overlap_schedule": True, "max_total_tokens": 2048,
            "max_running_requests": 4, "mem_fraction_static": 0.1, "context_length": 256,
            "skip_server_warmup": True, "nccl_port": free_port(), "log_level": "error",
            "sleep_on_idle": True,  # a scheduler without work would keep a core busy
        }  # fmt: skip
        super().__init__({**arguments, **more}, 60.0, random_weights=False)
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

    def load_from_disk(self, path: str) -> None:
        """Loads a checkpoint in SGLang's own way once it is idle: a running request would end its scheduler."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        deadline, manager = time.monotonic() + IDLE_SECONDS, self.tokenizer_manager
        while not self.call(manager.flush_cache()).success and time.monotonic() < deadline:
            time.sleep(0.05)
        obj = UpdateWeightFromDiskReqInput(model_path=path, load_format="auto")
        success, message, *_ = self.call(manager.update_weights_from_disk(obj, None))
        assert success, message

    def differs(self, checkpoint: Path, folder: Path) -> list[str]:
        """Loads a checkpoint in SGLang's own way; names what a rank held otherwise before."""
        synced = self.state(folder / "synced")
        self.load_from_disk(str(checkpoint))
        loaded = self.state(folder / "loaded")
        assert [ours.keys() for ours in synced] == [theirs.keys() for theirs in loaded]
        pairs = zip(synced, loaded, strict=True)
        return [name for ours, theirs in pairs for name in theirs if not torch.equal(ours[name], theirs[name])]

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


class Handle:
    """The handle of an engine in this process, in place of Ray's of a server actor; ``note`` hears of every call."""

    def __init__(self, engine: BareEngine, note: Callable[[str], None]) -> None:
        self._engine, self._note = engine, note

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self._note(method)
            answer = self._engine.start(getattr(self._engine, method)(*arguments))
            return SimpleNamespace(future=lambda: answer)

        return SimpleNamespace(remote=remote)
