# SPDX-License-Identifier: Apache-2.0
"""``SpmdRollout``: engines next to the ranks of a script that ``torchrun`` starts.

Its syncs are those of every colocated run (``sync/``), with the script's model in place of verl's training engine.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from verl_sync_plugin.config.settings import DEFAULT_MEGABYTES, SyncConfig, check_bucket_megabytes
from verl_sync_plugin.errors import RolloutError, SyncError
from verl_sync_plugin.memory import release_cache
from verl_sync_plugin.report import SyncReport, write_report
from verl_sync_plugin.rollouts import LOCAL, LocalLaunch, LocalSpec, rollout_of
from verl_sync_plugin.rollouts.gate import KV_CACHE, WEIGHTS
from verl_sync_plugin.spmd.engines import OwnEngine, engine_ranks, errors, make_groups
from verl_sync_plugin.spmd.prompts import Generated, Prompts, padded, request_of
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.sync.lora_manager import LoRAShardingManager
from verl_sync_plugin.trainers.base import trainer_device
from verl_sync_plugin.trainers.live import Live, LiveSource, LiveTrainer
from verl_sync_plugin.transport.agreement import Agreement


class SpmdShardingManager(LoRAShardingManager):
    """Reads whatever ``Live`` holds, in place of verl's training engine.

    Args:
        agreement: of all ranks of the script; all others as of ``ShardingManager``.
    """

    backend = LiveTrainer

    def __init__(self, agreement: Agreement, *arguments: Any) -> None:
        self._given = agreement
        super().__init__(*arguments)

    def _agree(self) -> Agreement:
        return self._given


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
        update_weights_bucket_megabytes: size of a bucket in MiB.
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
        update_weights_bucket_megabytes: int = DEFAULT_MEGABYTES,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        self.device = trainer_device()
        self._closed = False
        self._released: set[str] = set()
        self._version: int | None = None
        self.report: SyncReport | None = None

        with errors("making the rollout"):
            config, refused = settled_config(sync)
            agreement = self._agreement = Agreement(config.timeout_seconds)
            with agreement.attempt():
                if refused is not None:
                    raise refused

            def look() -> tuple[LocalSpec, LocalLaunch, tuple[int, ...], int]:
                _refuse_values(gpu_memory_utilization, self.device)
                folder, model_config = self._model(model, random_weights)
                ranks, cuda = engine_ranks(tensor_parallel_size, mesh), self.device.type == "cuda"
                spec = LocalSpec(
                    folder, model_config, len(ranks), dtype, gpu_memory_utilization, random_weights, cuda, config,
                    engine or {},
                )  # fmt: skip
                megabytes = check_bucket_megabytes(update_weights_bucket_megabytes, update_weights_bucket_megabytes)
                return spec, rollout_of(LOCAL).prepare_local(spec), ranks, megabytes << 20

            spec, launch, self.ranks, bucket_bytes = agreement.step("looking at the arguments", look)
            given = (dtype, gpu_memory_utilization, random_weights, update_weights_bucket_megabytes, config)
            agreement.same_on_all("the arguments", repr((*given, sorted(spec.arguments.items()))))
            self._group = make_groups(agreement, self.ranks, self.device, config.timeout_seconds)
            agreement.step("making room for the engine", lambda: release_cache(self.device))
            self._engine = OwnEngine(agreement, self._group, launch)
            process = self._engine.process
            endpoint = RolloutEndpoint(
                rollout_of(LOCAL),
                None if process is None else process.ask,
                self.ranks,
                launch.restores_uncovered,
                config.timeout_seconds,
            )
            self._live = Live(spec.config)
            self._manager = SpmdShardingManager(
                agreement, self._live, endpoint, config, bucket_bytes, self.device, dtype
            )

    def _model(self, model: Any, random_weights: bool) -> tuple[str, Mapping[str, Any]]:
        """A folder with the model's ``config.json``, and its content."""
        from transformers import AutoConfig, PretrainedConfig

        if isinstance(model, PretrainedConfig):
            if not random_weights:
                raise ValueError("random_weights=False: a config has no weights. Give model as a folder that has them.")
            self._folder = tempfile.TemporaryDirectory(prefix="verl-sync-model-")  # lives as long as the rollout
            model.save_pretrained(self._folder.name)
            name, config = self._folder.name, model
        elif isinstance(model, str | PathLike):
            name = str(model)
            try:
                config = AutoConfig.from_pretrained(name)
            except (OSError, ValueError) as error:
                raise ValueError(f"model={name}: {error}. Give a folder with a config.json, or a config.") from error
        else:
            raise ValueError(f"model={type(model).__name__}: give a folder with a config.json, or its config.")
        if not getattr(config, "architectures", None):
            raise ValueError("model: its config names no architectures. Set for example ['Qwen2ForCausalLM'].")
        return name, config.to_dict()

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
            manager.source = None  # another model: what is known of the last one's layout goes
        version = (self._version or 0) + 1 if version is None else version
        tags = sorted(self._released & {WEIGHTS})
        manager.keeps_staging = not self._released
        started = time.perf_counter()
        if tags:
            agreement.step("making room for the engine's weights", lambda: release_cache(self.device))
        before = time.perf_counter() - started

        async def sync() -> SyncReport:
            await manager.update_weights(tags, version)
            return await manager.finish([])

        try:
            self.report = asyncio.run(sync())
        finally:
            self._live.let_go()
        self._released.discard(WEIGHTS)
        self._version = version
        self.report.stages = {"before": before, **self.report.stages}
        if self._group.leads:
            write_report(self.report)
        return self.report

    def release_weights(self) -> None:
        """Gives the memory of the engine's weights back; CUDA graphs stay. The next sync resumes it.

        Raises:
            RolloutError: an engine failed.
        """
        self._change_memory("release", WEIGHTS)

    def resume_weights(self) -> None:
        """Takes the memory of the weights again, without their content.

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
        self._refuse_closed()
        with errors(what):
            if method == "resume":
                self._agreement.step("making room for the engine", lambda: release_cache(self.device))
            self._engine.call(what, method, [tag])
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
            attention_mask: of shape ``(N, P)``, for a tensor of ids; what is 0 or False is padding, on either side.
            pad_token_id: in padded places of the answer.

        Raises:
            RolloutError: a prompt or parameter does not fit, the engine has no weights or its memory is released, or an
                engine failed.
        """
        self._refuse_closed()
        with errors("generating"):
            request = self._agreement.step(
                "looking at the prompts", lambda: request_of(token_ids, sampling, attention_mask)
            )
            digests = self._agreement.gather("comparing the prompts", request.digest)
            mine = {digests[rank] for rank in self.ranks}
            if self._agreement.any("comparing the prompts", lambda: len(mine) > 1):
                raise SyncError("prompts\nthe ranks of one engine gave different prompts or parameters: give the same.")
            try:
                answered = self._engine.call("generating", "generate", request.prompts, request.sampling)
            except SyncError:
                self._engine.abort()
                raise
            answered = self._agreement.step("sharing the responses", lambda: self._group.share(answered))
        return padded(request, answered, pad_token_id, self._version, self.device)

    def digests(self) -> list[dict[str, str]] | None:
        """Digests of all parameters by name, for each rank of the engine; ``None`` on ranks that own no engine.

        Raises:
            RolloutError: an engine rank did not answer.
        """
        with errors("asking for digests"):
            found: list[dict[str, str]] | None = self._engine.call("asking for digests", "digests")
            return found

    def check_weights(self, action: str) -> dict[str, str] | None:
        """An action of the engine's own checker of weights, and its answer for the first rank's parameters.

        Raises:
            RolloutError: the engine cannot do that here.
        """
        with errors(action):
            found: dict[str, str] | None = self._engine.call(action, "check_weights", action)
            return found

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RolloutError("the rollout is closed")

    def close(self) -> None:
        """Ends this rank's engine, if it owns one; not collective. The end of the script does so, too."""
        self._closed = True
        self._manager.meeting.close()
        self._engine.close()

    def __enter__(self) -> SpmdRollout:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def settled_config(sync: SyncConfig | Mapping[str, Any] | None) -> tuple[SyncConfig, Exception | None]:
    """The settings of the sync; with what is wrong about them, all defaults."""
    try:
        config = sync if isinstance(sync, SyncConfig) else SyncConfig.from_mapping(sync)
        if config.pause != "abort" or config.max_probs_diff is not None or not config.enabled:
            raise ValueError(
                f"sync.pause={config.pause!r}, sync.max_probs_diff={config.max_probs_diff}, sync.enabled="
                f"{config.enabled}: of no use to a script, whose engines share its GPUs. Leave all three out."
            )
    except (ValueError, TypeError) as error:
        return SyncConfig(), error
    return config, None


def _refuse_values(gpu_memory_utilization: Any, device: torch.device) -> None:
    if not isinstance(gpu_memory_utilization, int | float) or not 0 < gpu_memory_utilization < 1:
        raise ValueError(f"gpu_memory_utilization={gpu_memory_utilization!r}: use a share of a GPU, such as 0.4.")
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
    if device.type == "cuda" and "expandable_segments:true" in allocator.lower():
        raise ValueError(
            f"PYTORCH_CUDA_ALLOC_CONF={allocator}: such memory cannot be shared with the engine. Leave out "
            "expandable_segments."
        )
