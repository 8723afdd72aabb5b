# SPDX-License-Identifier: Apache-2.0
"""A real SGLang engine without verl's server actor, as a rollout endpoint."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ports import free_port
from verl_sync_plugin import compat
from verl_sync_plugin.rollouts.sglang.request import LOADER, dumps, hand_down, new_token, pack_request
from verl_sync_plugin.sync.endpoint import LoadOutcome, PendingLoad, RolloutEndpoint
from verl_sync_plugin.transport.protocol import LoadRequest

IDLE_SECONDS = 20.0
DUMP = "bare_engine.inspect_loader.dump"
SPOIL = "bare_engine.spoiling_loader.spoil"
NEGATE = "bare_engine.spoiling_loader.negate"
REVERSE = "bare_engine.spoiling_loader.reverse"
KEEP_DERIVED = "bare_engine.spoiling_loader.keep_derived"
PLAIN = ("bare_engine.plain_loader.load", "bare_engine.plain_loader.load_and_forget_prefixes")


class BareEngine:
    """``sgl.Engine`` on CPU; SGLang's calls run in its own event loop, on one thread at a time."""

    def __init__(
        self, model_path: str, tp: int, load_format: str = "dummy", loaders: tuple[str, ...] = (), **more: Any
    ) -> None:
        import sglang

        hand_down(new_token())
        self.tp = tp
        self._lock = threading.Lock()
        self.engine = sglang.Engine(
            model_path=model_path,
            tp_size=tp,
            load_format=load_format,
            custom_weight_loader=[LOADER, DUMP, SPOIL, NEGATE, REVERSE, KEEP_DERIVED, *PLAIN, *loaders],
            device="cpu",
            dtype="bfloat16",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            skip_tokenizer_init=True,
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            max_total_tokens=2048,
            max_running_requests=4,
            mem_fraction_static=0.1,
            context_length=256,
            skip_server_warmup=True,
            nccl_port=free_port(),
            sleep_on_idle=True,  # a scheduler without work would keep a core busy
            log_level="error",
            **more,
        )

    def call(self, coroutine: Any) -> Any:
        """Runs one tokenizer-manager call in the engine's loop."""
        with self._lock:
            asyncio.set_event_loop(self.engine.loop)
            return self.engine.loop.run_until_complete(coroutine)

    async def _update(self, packed: bytes, loader: str, version: str | None) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        manager = self.engine.tokenizer_manager
        obj = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[packed] * self.tp, load_format=loader, flush_cache=False, weight_version=version
        )
        async with compat.weight_update_session(manager):
            success, message = await manager.update_weights_from_tensor(obj, None)
        if not success:
            raise RuntimeError(message)

    def load(self, request: LoadRequest, version: str | None) -> None:
        """Has all ranks call our loader."""
        self.call(self._update(pack_request(request.to_wire()), LOADER, version))

    def state(self, path: Path) -> list[dict[str, torch.Tensor]]:
        """What every rank really holds."""
        self.call(self._update(dumps([(str(path), torch.empty(0))]), DUMP, None))
        return [torch.load(f"{path}.{rank}") for rank in range(self.tp)]

    def spoil_next(self, parameter: str) -> None:
        """Has the last rank flip a bit of a parameter behind the copies of the next sync."""
        self.call(self._update(dumps([(parameter, torch.empty(0))]), SPOIL, None))

    def negate_next(self, parameter: str) -> None:
        """Has all ranks change the sign of a parameter behind the copies of the next sync."""
        self.call(self._update(dumps([(parameter, torch.empty(0))]), NEGATE, None))

    def reverse_next(self, table: str) -> None:
        """Has all ranks turn a table of their models around behind the copies of the next sync."""
        self.call(self._update(dumps([(table, torch.empty(0))]), REVERSE, None))

    def keep_derived_next(self) -> None:
        """Has all ranks keep what they have derived from their weights before the next sync."""
        self.call(self._update(dumps([("", torch.empty(0))]), KEEP_DERIVED, None))

    def load_from_disk(self, path: str) -> None:
        """SGLang's own way from a checkpoint into the running engine.

        It ends the scheduler when a request is still running, and an answered one may be for a moment.
        """
        deadline = time.monotonic() + IDLE_SECONDS
        while not self.call(self.engine.tokenizer_manager.flush_cache()).success and time.monotonic() < deadline:
            time.sleep(0.05)
        success, message, *_ = self.engine.update_weights_from_disk(path, load_format="auto")
        assert success, message

    def generate(self, prompt: list[int], tokens: int, adapter: str | None = None) -> tuple[list[int], list[float]]:
        """Greedy token ids and their log-probabilities, with an adapter that the engine serves."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        named = {"lora_path": [adapter]} if adapter else {}
        answer = self.engine.generate(input_ids=[prompt], sampling_params=sampling, return_logprob=True, **named)[0]
        return answer["output_ids"], [item[0] for item in answer["meta_info"]["output_token_logprobs"]]

    def shutdown(self) -> None:
        self.engine.shutdown()


class BareEngineEndpoint(RolloutEndpoint):
    """Rank 0 of the default group leads; all ranks belong to the one engine."""

    def __init__(self, engine: BareEngine | None, restores_uncovered: bool = False) -> None:
        self._engine = engine
        self._backup = restores_uncovered
        self.abandoned: list[str] = []
        self._released: set[str] = set()
        self.reports: list[dict[str, Any]] = []
        self.flushes = 0
        self.flushed_behind = 0  # those of them that were asked for during the load
        self._behind: Future[Any] | None = None

    @property
    def leader(self) -> bool:
        return self._engine is not None

    @property
    def restores_uncovered(self) -> bool:
        return self._backup

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(dist.get_world_size()))

    def _bare(self) -> BareEngine:
        assert self._engine is not None, "leader only"
        return self._engine

    def sleep(self, tags: list[str]) -> None:
        """Releases what is resident of ``tags``."""
        todo = [tag for tag in tags if tag not in self._released]
        if todo:
            from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

            manager = self._bare().engine.tokenizer_manager
            self._bare().call(manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=todo)))
            self._released |= {*todo}

    async def resume(self, tags: list[str]) -> None:
        todo = [tag for tag in tags if tag in self._released]
        if todo:
            # the engine's loop cannot run inside ours
            await asyncio.to_thread(self._resume, todo)

    def _resume(self, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        self._bare().call(
            self._bare().engine.tokenizer_manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))
        )
        self._released -= {*tags}

    async def finish(self, tags: list[str]) -> None:
        await self.resume(tags)
        behind, self._behind = self._behind, None
        if behind is None:
            flushed = await asyncio.to_thread(self._flush)
        else:
            flushed = await asyncio.wrap_future(behind)
            self.flushed_behind += 1
        assert flushed.success
        self.flushes += 1

    def _flush(self) -> Any:
        return self._bare().call(self._bare().engine.tokenizer_manager.flush_cache())

    def flush_behind_load(self) -> None:
        if not self._released:
            self._behind = Future()
            # the engine's loop is busy with the load until then
            threading.Thread(target=lambda done: done.set_result(self._flush()), args=(self._behind,)).start()

    async def abandon(self, why: str) -> None:
        self.abandoned.append(why)

    async def publish(self, report: dict[str, Any]) -> None:
        self.reports.append(report)

    async def load_adapter(self, config: Any, factors: Any, weight_version: str | None) -> LoadOutcome:
        raise AssertionError("these stories move whole weights")

    def start_load(self, request: LoadRequest, weight_version: str | None) -> PendingLoad:
        self._behind = None  # of a load that failed
        return _ThreadLoad(self._bare(), request, weight_version)


class _ThreadLoad(PendingLoad):
    def __init__(self, engine: BareEngine, request: LoadRequest, version: str | None) -> None:
        self._future: Future[None] = Future()
        threading.Thread(target=self._run, args=(engine, request, version), daemon=True).start()

    def _run(self, engine: BareEngine, request: LoadRequest, version: str | None) -> None:
        try:
            engine.load(request, version)
            self._future.set_result(None)
        except Exception as error:
            self._future.set_exception(error)

    def finished(self) -> bool:
        return self._future.done()

    async def outcome(self, timeout: float) -> LoadOutcome:
        await asyncio.wait_for(asyncio.wrap_future(self._future), timeout)
        return LoadOutcome()
