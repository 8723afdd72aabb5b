# SPDX-License-Identifier: Apache-2.0
"""``SpmdRollout``: engines next to the ranks of a script that ``torchrun`` starts. Its syncs are those of every
colocated run (``sync/``), with the script's model in place of verl's training engine."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import asdict

from verl_sync_plugin.config.settings import DEFAULT_MEGABYTES, SyncConfig, bucket_megabytes, is_whole
from verl_sync_plugin.errors import RankLostError, RolloutError, SyncError
from verl_sync_plugin.report import SyncReport, write_report
from verl_sync_plugin.rollouts import LOCAL, LocalLaunch, LocalSpec, rollout_of
from verl_sync_plugin.rollouts.gate import KV_CACHE, WEIGHTS
from verl_sync_plugin.rollouts.process import EngineProcess
from verl_sync_plugin.room import release_cache
from verl_sync_plugin.sync.endpoint import Call, RolloutEndpoint
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.trainers.base import trainer_device
from verl_sync_plugin.trainers.script import Given, ScriptTrainer, Trained
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import agreement_seconds

ROUND_SECONDS = 1.0
Sampling = Mapping[str, Any] | Sequence[Mapping[str, Any]]  # for all prompts, or for each


class SpmdShardingManager(ShardingManager):
    """Reads what ``Given`` holds, in place of verl's training engine."""

    backend = ScriptTrainer


class SpmdRollout(AbstractContextManager["SpmdRollout"]):
    """SGLang on the GPUs of the ranks that train, one engine for every tensor-parallel group.

    All methods but ``close`` are collective: every rank of the world calls them, in the same order. What fails on one
    rank is raised on all of them with the same text, and the next call works again; only a rank that died or did not
    answer in time (``RankLostError``) ends that. The first rank of each group owns the engine, which runs in a process
    of its own. Makes the process group ``WORLD`` if the script has not. On GPUs call ``torch.cuda.set_device`` before.
    Raises RolloutError where an argument does not fit, or SGLang could not be launched.

    Args:
        model: folder, or name on the Hub, with a ``config.json`` that names ``architectures``.
        tensor_parallel_size: of each engine; neighbouring ranks share one.
        dtype: of the engine's weights.
        gpu_memory_utilization: share of a GPU that the engine takes for weights and KV cache together.
        random_weights: the engine starts without the weights of ``model``, and generates after the first sync only.
        sync: settings of the sync, a ``SyncConfig`` or its fields.
        update_weights_bucket_megabytes: size of a bucket in MiB.
        engine: more arguments for SGLang (``ServerArgs``).
    """

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        dtype: str = "bfloat16",
        gpu_memory_utilization: float = 0.4,
        random_weights: bool = True,
        sync: SyncConfig | Mapping[str, Any] | None = None,
        update_weights_bucket_megabytes: int = DEFAULT_MEGABYTES,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        self.device, self._open, self._closed = trainer_device(), ExitStack(), False  # ``close`` ends what is open
        self.report: SyncReport | None = None  # of the last sync
        self._ask: Call | None = None  # on ranks that own an engine
        self._released: set[str] = set()
        self._version: int | None = None
        with errors("making the rollout"):
            try:
                config, refused = script_sync_config(sync), None
            except (ValueError, TypeError) as error:
                config, refused = SyncConfig(), error
            agreement = self._agreement = Agreement(config.timeout_seconds)
            megabytes = update_weights_bucket_megabytes

            def look() -> tuple[LocalSpec, LocalLaunch]:
                if refused is not None:
                    raise refused
                _refuse_values(gpu_memory_utilization, self.device)
                bucket_megabytes(megabytes, None)
                self.ranks, cuda = engine_ranks(tensor_parallel_size), self.device.type == "cuda"
                spec = LocalSpec(
                    str(model), config_of(str(model)), len(self.ranks), dtype, gpu_memory_utilization, random_weights,
                    cuda, config, engine or {},
                )  # fmt: skip
                return spec, rollout_of(LOCAL).prepare_local(spec)

            spec, launch = agreement.step("looking at the arguments", look)
            given = (tensor_parallel_size, dtype, gpu_memory_utilization, random_weights, megabytes, config)
            agreement.same_on_all("the arguments", repr((*given, sorted(spec.arguments.items()))))
            devices, self._group = make_groups(agreement, self.ranks, self.device, config.timeout_seconds)
            agreement.step("making room for the engine", lambda: release_cache(self.device))
            ready: Future[None] | None = None
            with ExitStack() as opened:
                with agreement.attempt():
                    if dist.get_rank() == self.ranks[0]:
                        process = EngineProcess(launch, devices)
                        opened.callback(process.close)
                        self._ask, ready = process.ask, process.ready
                self._awaited("launching the engine", ready)
                endpoint = RolloutEndpoint(
                    rollout_of(LOCAL), self._ask, self.ranks, not random_weights, config.timeout_seconds
                )
                self._given = Given(spec.config)
                self._manager = SpmdShardingManager(
                    self._given, endpoint, config, megabytes << 20, self.device, dtype, agreement=agreement
                )
                opened.callback(self._manager.connection.close)
                self._open = opened.pop_all()

    def _call(self, what: str, method: str, *arguments: Any) -> Any:
        """Calls a server's method on all engines; returns this rank's answer, ``None`` without one. Collective."""
        self._refuse_closed()
        with errors(what):
            return self._awaited(what, None if self._ask is None else self._ask(method, *arguments))

    def _awaited(self, what: str, future: Future[Any] | None) -> Any:
        """Waits in rounds: an engine may take any time, and a rank that has failed is heard at once."""
        answer = None
        while True:
            with self._agreement.attempt():
                if future is not None and wait([future], ROUND_SECONDS).done:
                    answer, future = future.result(), None
            if not self._agreement.settle(what, waiting=future is not None):
                return answer

    def sync_weights(self, source: Trained | Any, version: int | None = None) -> SyncReport:
        """Moves the trainer's weights into the engines, with hashes and proofs; returns this rank's report. Weights
        that are released are resumed on the way; a KV cache that is released stays so. Raises RolloutError where this
        is closed, SyncError where any rank or engine failed, or was given what cannot be synced: the trainer's weights
        are as before, and the engines generate nothing until a sync succeeds.

        Args:
            source: a ``fully_shard``-ed, FSDP1, DDP or plain module of transformers, PEFT's adapters in it merged on
                their way; a state dict of tensors or DTensors by the names of a checkpoint; or a training engine of
                verl. Every rank gives the same. Nothing of it is changed or kept, but for the module itself.
            version: of the weights; one more than the last when not given, 1 at first.
        """
        self._refuse_closed()
        manager, agreement = self._manager, self._agreement

        def take() -> bool:
            if version is not None and not is_whole(version, 0):
                raise ValueError(f"version={version!r}: not a whole number from 0 on. Leave it out to count syncs.")
            return self._given.take(source)

        if agreement.any("looking at what was given", take):
            manager.source = None  # another model: what is known of the last one's layout goes
        tags = [WEIGHTS] if WEIGHTS in self._released else []
        manager.keeps_staging = not self._released
        around = SyncReport()
        with around.stage("before"):
            if tags:
                agreement.step("making room for the engine's weights", lambda: release_cache(self.device))

        number = (self._version or 0) + 1 if version is None else version

        async def sync() -> SyncReport:
            await manager.update_weights(tags, number)
            return await manager.finish([])

        try:
            self.report = asyncio.run(sync())
        finally:
            self._given.let_go()
        self._released.discard(WEIGHTS)
        self._version = number
        self.report.put_before(around)
        if self._ask is not None:
            write_report(self.report)
        return self.report

    def release_weights(self) -> None:
        """Gives the memory of the engine's weights back; CUDA graphs stay. The next sync resumes it."""
        self._release(WEIGHTS)

    def resume_weights(self) -> None:
        """Takes the memory of the weights again, without their content; a sync does so by itself."""
        self._resume(WEIGHTS)

    def release_kv(self) -> None:
        """Gives the memory of the KV cache back; CUDA graphs stay."""
        self._release(KV_CACHE)

    def resume_kv(self) -> None:
        """Takes the memory of the KV cache again."""
        self._resume(KV_CACHE)

    def _release(self, tag: str) -> None:
        self._released.add(tag)  # also of an engine that fails, or releases it too late: a resume asks each
        self._call(f"release of {tag}", "release_tags", [tag])

    def _resume(self, tag: str) -> None:
        with errors(f"resume of {tag}"):
            self._agreement.step("making room for the engine", lambda: release_cache(self.device))
        self._call(f"resume of {tag}", "wake", [tag])
        self._released.discard(tag)

    def generate(self, token_ids: Sequence[Sequence[int]], sampling: Sampling | None = None) -> list[Generated]:
        """Generates. All ranks of an engine give the same prompts and get all responses; engines may be given different
        ones, and different numbers of them. Raises RolloutError where a prompt or parameter does not fit, or the engine
        has no weights, has no memory or failed.

        Args:
            token_ids: a list of token ids for each prompt.
            sampling: SGLang's sampling parameters (``temperature``, ``max_new_tokens``, ``stop_token_ids``, …), for all
                prompts or one for each; ``n`` is the number of responses to a prompt, which are next to each other.
        """
        self._refuse_closed()
        with errors("generating"):
            agreement = self._agreement
            request = agreement.step("looking at the prompts", lambda: request_of(token_ids, sampling))
            digest = agreement.step("packing the prompts", lambda: hashlib.sha256(pickle.dumps(request)).digest())
            digests = agreement.gather("comparing the prompts", digest)
            with agreement.attempt():
                if len({digests[rank] for rank in self.ranks}) > 1:
                    raise ValueError("the ranks of one engine gave different prompts or parameters: give the same.")
            agreement.settle("comparing the prompts")
            try:
                answered = [self._call("generating", "generate", *request)]
            except RuntimeError:
                if self._ask is not None:
                    self._ask("abort")
                raise
            share = partial(dist.broadcast_object_list, answered, self.ranks[0], self._group)
            agreement.step("sharing the responses", share)
        return [
            Generated(prompt, ids, log_probs, reason, self._version)
            for prompt, (ids, log_probs, reason) in zip(request[0], answered[0], strict=True)
        ]

    def digests(self) -> list[dict[str, str]] | None:
        """Digests of all parameters by name, for each rank of the engine; ``None`` on ranks that own no engine."""
        return self._call("asking for digests", "digests")

    def reset_weights(self) -> None:
        """Fills all parameters of the engine with random numbers."""
        self._call("resetting the weights", "reset_weights")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RolloutError("the rollout is closed")

    def close(self) -> None:
        """Ends this rank's engine, if it owns one; not collective. The end of the script does so, too."""
        self._closed = True
        self._open.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def script_sync_config(sync: SyncConfig | Mapping[str, Any] | None) -> SyncConfig:
    config = SyncConfig.from_mapping(asdict(sync) if isinstance(sync, SyncConfig) else sync)
    if config.pause != "abort" or config.max_probs_diff is not None or not config.enabled:
        raise ValueError(
            f"sync.pause={config.pause!r}, sync.max_probs_diff={config.max_probs_diff}, sync.enabled="
            f"{config.enabled}: of no use to a script, whose engines share its GPUs. Leave all three out."
        )
    return config


def _refuse_values(gpu_memory_utilization: Any, device: torch.device) -> None:
    if not isinstance(gpu_memory_utilization, int | float) or not 0 < gpu_memory_utilization < 1:
        raise ValueError(f"gpu_memory_utilization={gpu_memory_utilization!r}: use a share of a GPU, such as 0.4.")
    if torch.version.hip:
        raise ValueError("this torch is for AMD's GPUs, and weight sync serves NVIDIA's. Load weights in another way.")
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
    if device.type == "cuda" and "expandable_segments:true" in allocator.replace(" ", "").lower():
        raise ValueError(f"PYTORCH_CUDA_ALLOC_CONF={allocator}: engines cannot open it. Leave out expandable_segments.")


@contextmanager
def errors(what: str) -> Iterator[None]:
    """Context in which a failure is no failed sync, but a ``RolloutError``; ``what`` names the work in its message."""
    try:
        yield
    except RankLostError:
        raise
    except SyncError as error:
        raise RolloutError(f"{what} failed.\n{str(error).partition(chr(10))[2] or error}") from error


def config_of(model: str) -> Mapping[str, Any]:
    """The content of a model's ``config.json``. Raises ValueError where there is none, or it names no architectures."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"model={model}: {error}. Give a folder with a config.json, or a name on the Hub.") from error
    if not getattr(config, "architectures", None):
        raise ValueError("model: its config names no architectures. Set for example ['Qwen2ForCausalLM'].")
    return dict(config.to_dict())


def engine_ranks(size: int) -> tuple[int, ...]:
    """The ranks of this rank's engine, in tensor-parallel order. Raises ValueError where the size does not fit."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if not is_whole(size, 1) or world % size:
        raise ValueError(f"tensor_parallel_size={size!r}: use a number that divides the {world} ranks.")
    first = rank // size * size
    return tuple(range(first, first + size))


def make_groups(
    agreement: Agreement, ranks: tuple[int, ...], device: torch.device, timeout_seconds: float
) -> tuple[Sequence[str], dist.ProcessGroup]:
    """Makes the gloo groups of all engines. Collective over the world. Returns the GPUs of this rank's engine, in
    tensor-parallel order (none on a CPU), and its group."""
    name = ""
    if device.type == "cuda":
        visible, index = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip(), device.index or 0
        name = visible.split(",")[index].strip() if visible else str(index)
    places = agreement.gather("finding the engines' GPUs", (socket.gethostname(), name))
    agreement.step("looking at the engines' GPUs", lambda: check_places(len(ranks), places))
    timeout = timedelta(seconds=agreement_seconds(timeout_seconds))
    group, _ = dist.new_subgroups(len(ranks), timeout=timeout, backend="gloo")
    return [places[rank][1] for rank in ranks if places[rank][1]], group


def check_places(size: int, places: Sequence[tuple[str, str]]) -> None:
    """Refuses engines of ``size`` ranks that spread over hosts, or share a GPU. ``places``: by rank the host, and the
    GPU as ``CUDA_VISIBLE_DEVICES`` calls it there ("" on a CPU)."""
    for first in range(0, len(places), size):
        if len(hosts := {host for host, _ in places[first : first + size]}) > 1:
            raise ValueError(
                f"the engine of ranks {first} to {first + size - 1} would be on the hosts {', '.join(sorted(hosts))}, "
                "and SpmdRollout launches none on several. Use a tensor_parallel_size of at most the GPUs of one host."
            )
    for rank, (host, device) in enumerate(places):
        if device and (first := places.index((host, device))) < rank:
            raise ValueError(
                f"ranks {first} and {rank} are both on GPU {device} of {host}. Call "
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before SpmdRollout."
            )


@dataclass(frozen=True)
class Generated:
    """One response of ``generate``, the same on all ranks of an engine."""

    prompt_ids: list[int]
    response_ids: list[int]  # with the token that ended it
    log_probs: list[float]  # of ``response_ids``, as the engine computed them when it chose
    finish_reason: str  # ``stop``, ``length`` or ``abort``
    version: int | None  # of the weights, as ``sync_weights`` counts; ``None`` before the first sync


def request_of(
    token_ids: Sequence[Sequence[int]], sampling: Sampling | None
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Checks the arguments of ``SpmdRollout.generate``. Returns a prompt and sampling parameters per response."""
    prompts = [list(prompt) for prompt in token_ids]
    if not prompts:
        raise ValueError("token_ids=[]: no prompts. Give at least one on every rank.")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"token_ids[{index}] has no tokens. Give every prompt at least one.")
        if not all(is_whole(token, 0) for token in prompt):
            raise ValueError(f"token_ids[{index}]={prompt[:8]}…: not token ids. Use whole numbers from 0 on.")
    each = [dict(sampling or {})] * len(prompts) if sampling is None or isinstance(sampling, Mapping) else sampling
    if len(each) != len(prompts):
        raise ValueError(f"sampling: {len(each)} entries for {len(prompts)} prompts. Give one mapping, or one each.")
    asked: list[list[int]] = []
    parameters: list[dict[str, Any]] = []
    for prompt, settings in zip(prompts, each, strict=True):
        given = dict(settings)
        times = given.pop("n", 1)
        if not is_whole(times, 1):
            raise ValueError(f"sampling['n']={times!r}: use a number of responses from 1 on.")
        for key in filter(given.get, ("stop", "stop_regex", "min_new_tokens", "json_schema", "regex", "ebnf")):
            remedy = "Use stop_token_ids." if key.startswith("stop") else "Leave it out."
            raise ValueError(f"sampling[{key!r}]={given[key]!r}: needs a tokenizer. {remedy}")
        asked += [prompt] * times
        parameters += [given] * times
    return asked, parameters
