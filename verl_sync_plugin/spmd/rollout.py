# SPDX-License-Identifier: Apache-2.0
"""``SpmdRollout``: an engine beside the ranks of a script that ``torchrun`` starts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from verl_sync_plugin.config.bucket_size import DEFAULT_MEGABYTES
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import RankLostError, RolloutError, SyncError
from verl_sync_plugin.memory.room import release_cache
from verl_sync_plugin.report.file import write_report
from verl_sync_plugin.report.sync_report import SyncReport
from verl_sync_plugin.rollouts.base import LocalEngineProcess
from verl_sync_plugin.spmd.arguments import Arguments, settled_config
from verl_sync_plugin.spmd.groups import make_groups
from verl_sync_plugin.spmd.manager import SpmdShardingManager
from verl_sync_plugin.spmd.prompts import Generated, Prompts, padded, request_of
from verl_sync_plugin.sync.endpoint import abandon
from verl_sync_plugin.trainers.base import trainer_device
from verl_sync_plugin.trainers.live import Live, LiveSource
from verl_sync_plugin.transport.agreement import Agreement

WEIGHTS, KV_CACHE = "weights", "kv_cache"  # memory tags
ROUND_SECONDS = 1.0  # after so long a rank that waits for its engine hears whether another one has failed


class SpmdRollout:
    """SGLang on the GPUs of the ranks that train, one engine for every tensor-parallel group.

    All methods but ``close`` are collective: every rank of the world calls them, in the same order. What fails on one
    rank is raised on all of them with the same text, and the next call works again; only a rank that died or did not
    answer in time (``RankLostError``) ends that.

    The first rank of each group owns the engine, which runs in a process of its own. The process group ``WORLD`` is
    made if the script has not. On GPUs the script has called ``torch.cuda.set_device`` before.

    Args:
        model: folder with a ``config.json``, or a config of transformers with its ``architectures``.
        tensor_parallel_size: of each engine; neighbouring ranks share one. 1 when not given.
        mesh: instead: its dimension ``tp`` (or its only one) are the ranks of one engine. Of all ranks of the world.
        dtype: of the engine's weights.
        gpu_memory_utilization: share of a GPU that the engine takes for weights and KV cache together.
        random_weights: the engine starts without the weights of ``model``, and generates after the first sync only.
        sync: settings of the sync, a ``SyncConfig`` or its fields.
        update_weights_bucket_megabytes: size of a bucket in MiB, or ``auto``.
        engine: more arguments for SGLang (``ServerArgs``).

    Raises:
        RolloutError: an argument does not fit, or SGLang could not be launched.

    Attributes:
        device: where this rank computes.
        ranks: of this rank's engine, in tensor-parallel order.
        report: of the last sync; ``None`` before.
    """

    def __init__(
        self,
        model: Any,
        *,
        tensor_parallel_size: int | None = None,
        mesh: DeviceMesh | None = None,
        dtype: str = "bfloat16",
        gpu_memory_utilization: float = 0.4,
        random_weights: bool = True,
        sync: SyncConfig | Mapping[str, Any] | None = None,
        update_weights_bucket_megabytes: int | str = DEFAULT_MEGABYTES,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        self.device = trainer_device()
        config, refused = settled_config(sync)
        self._engine: LocalEngineProcess | None = None
        self._closed = False
        self._agreement = Agreement(config.timeout_seconds)
        with self._errors("making the rollout"):
            with self._agreement.attempt():
                if refused is not None:
                    raise refused
            given = (model, tensor_parallel_size, mesh, dtype, gpu_memory_utilization, random_weights, engine or {})
            arguments = self._agreement.step(
                "looking at the arguments",
                lambda: Arguments(*given, update_weights_bucket_megabytes, config, self.device),
            )
            self._agreement.same_on_all("the arguments", arguments.words)
            self._group = make_groups(self._agreement, arguments.ranks, self.device, config.timeout_seconds)
            self.ranks = self._group.ranks
            self._launch(arguments)
            self._live = Live(arguments.config)
            endpoint = arguments.launch.endpoint(self._engine, self.ranks)
            bucket = arguments.bucket_bytes
            self._manager = SpmdShardingManager(
                self._live, self._agreement, endpoint, config, bucket, self.device, dtype
            )
        self._arguments = arguments  # its folder of a config lives as long
        self._released: set[str] = set()
        self._version: int | None = None
        self.report: SyncReport | None = None

    def _launch(self, arguments: Arguments) -> None:
        def start() -> None:
            if self._group.leads:
                self._engine = arguments.launch.start(self._group.devices)

        try:
            self._agreement.step("starting the engine", start)
            self._awaited("launching the engine", None if self._engine is None else self._engine.ready)
        except BaseException:
            self.close()
            raise

    def sync_weights(self, source: LiveSource | Any, version: int | None = None) -> SyncReport:
        """Moves the trainer's weights into the engines: the phase of a colocated run, with its hashes and proofs.

        Weights that are released are resumed on the way; a KV cache that is released stays so.

        Args:
            source: an ``fully_shard``-ed, FSDP1, DDP or plain module of transformers, PEFT's adapters in it merged on
                their way; a state dict of tensors or DTensors by the names of a checkpoint; or a training engine of
                verl. Every rank gives the same. Nothing of it is changed or kept, but for the module itself.
            version: of the weights; one more than the last when not given, 1 at first.

        Returns:
            What this rank saw of the sync; ``phase_seconds`` is the whole of it.

        Raises:
            SyncError: any rank or engine failed; the same text on all ranks. The trainer's weights are as before, the
                engines generate nothing until a sync succeeds.
        """
        self._refuse_closed()
        manager, agreement = self._manager, self._agreement
        if agreement.any("looking at the source of the weights", lambda: self._live.take(source)):
            manager.begin_anew()
        version = (self._version or 0) + 1 if version is None else version
        tags = sorted(self._released & {WEIGHTS})
        started = time.perf_counter()
        if tags:
            agreement.step("making room for the engine's weights", lambda: release_cache(self.device))
        before = time.perf_counter() - started
        try:
            self.report = asyncio.run(self._sync(tags, version))
        finally:
            self._live.let_go()
        self._released.discard(WEIGHTS)
        self._version = version
        self.report.stages = {"before": before, **self.report.stages}
        if self._group.leads:
            write_report(self.report)
        return self.report

    async def _sync(self, tags: list[str], version: int) -> SyncReport:
        manager = self._manager
        try:
            await manager.update_weights(tags, version)
            return await manager.finish([])
        except (SyncError, asyncio.CancelledError) as error:
            await abandon(manager.endpoint, str(error) or repr(error))  # whatever failed: the engine may not generate
            raise

    def release_weights(self) -> None:
        """Gives the memory of the engine's weights back; CUDA graphs stay. The next sync resumes it.

        Raises:
            RolloutError: an engine failed.
        """
        self._change_memory("release", WEIGHTS)

    def resume_weights(self) -> None:
        """Takes the memory of the weights again, without their content unless ``sync.weights_cpu_backup`` is on.

        A sync does so by itself. Torch's cached memory is handed back before.

        Raises:
            RolloutError: an engine failed.
        """
        self._change_memory("resume", WEIGHTS)

    def release_kv(self) -> None:
        """Gives the memory of the KV cache back; CUDA graphs stay. Errors as ``release_weights``."""
        self._change_memory("release", KV_CACHE)

    def resume_kv(self) -> None:
        """Takes the memory of the KV cache again. Torch's cached memory is handed back before. Errors as
        ``release_weights``."""
        self._change_memory("resume", KV_CACHE)

    def _change_memory(self, method: str, tag: str) -> None:
        what = f"{method} of {tag}"
        with self._errors(what):
            if method == "resume":
                self._agreement.step("making room for the engine", lambda: release_cache(self.device))
            self._awaited(what, self._ask(method, [tag]))
        (self._released.add if method == "release" else self._released.discard)(tag)

    def generate(
        self,
        token_ids: Prompts,
        sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        pad_token_id: int = 0,
    ) -> Generated:
        """Responses to some prompts. All ranks of an engine give the same prompts and get all responses; engines may be
        given different ones, and different numbers of them.

        Args:
            token_ids: a list of token ids for each prompt, or whole numbers of shape ``(N, P)``.
            sampling: SGLang's sampling parameters (``temperature``, ``top_p``, ``max_new_tokens``, ``stop_token_ids``,
                ``ignore_eos``, …), for all prompts or one for each; ``n`` is the number of responses to a prompt.
            attention_mask: of shape ``(N, P)`` beside a tensor of ids; what is 0 or False is padding, on either side.
            pad_token_id: in padded places of the answer.

        Raises:
            RolloutError: a prompt or parameter does not fit, the engine has no weights or its memory is released, or an
                engine failed.
        """
        with self._errors("generating"):
            request = self._agreement.step(
                "looking at the prompts", lambda: request_of(token_ids, sampling, attention_mask)
            )
            digests = self._agreement.gather("comparing the prompts", request.digest)
            mine = {digests[rank] for rank in self.ranks}
            if self._agreement.any("comparing the prompts", lambda: len(mine) > 1):
                raise SyncError("prompts\nthe ranks of one engine gave different prompts or parameters: give the same.")
            try:
                answered = self._awaited("generating", self._ask("generate", request.prompts, request.sampling))
            except SyncError:
                self._ask("abort")
                raise
            answered = self._agreement.step("sharing the responses", lambda: self._group.share(answered))
        return padded(request, answered, pad_token_id, self._version, self.device)

    def _ask(self, method: str, *arguments: Any) -> Future[Any] | None:
        return None if self._engine is None else self._engine.ask(method, *arguments)

    def _awaited(self, what: str, future: Future[Any] | None) -> Any:
        """Collective: the answer of this rank's engine, once every engine has answered; ``None`` where there is none.

        Raises:
            SyncError: any engine failed, which ends the wait of all.
        """
        answer = None
        while True:
            with self._agreement.attempt():
                if future is not None and wait([future], ROUND_SECONDS).done:
                    answer, future = future.result(), None
            if not self._agreement.settle(what, waiting=future is not None):
                return answer

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """What fails inside is no failed sync."""
        self._refuse_closed()
        try:
            yield
        except RankLostError:
            raise
        except SyncError as error:
            raise RolloutError(f"{what} failed.\n{str(error).partition(chr(10))[2] or error}") from error

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RolloutError("the rollout is closed")

    def close(self) -> None:
        """Ends this rank's engine, if it owns one; not collective. The end of the script does so, too."""
        self._closed = True
        with suppress(AttributeError):  # of a rollout that could not be made
            self._manager.meeting.close()
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> SpmdRollout:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
