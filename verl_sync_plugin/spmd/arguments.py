# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``SpmdRollout``, checked before anything is spent."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from verl_sync_plugin.config.settings import SyncConfig, check_bucket_megabytes
from verl_sync_plugin.rollouts import LOCAL, rollout_of
from verl_sync_plugin.rollouts.base import LocalSpec
from verl_sync_plugin.spmd.groups import engine_ranks


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


class Arguments:
    """See ``SpmdRollout`` for the arguments.

    Raises:
        ValueError: one does not fit; names it, its value and the remedy.

    Attributes:
        config: of the model, as in ``config.json``.
        ranks: of this rank's engine.
        launch: of the engine.
        bucket_bytes: size of a bucket.
        dtype: of the engine's weights.
        words: what all ranks have to agree on.
    """

    def __init__(
        self,
        model: Any,
        tensor_parallel_size: int | None,
        mesh: DeviceMesh | None,
        dtype: str,
        gpu_memory_utilization: float,
        random_weights: bool,
        engine: Mapping[str, Any],
        megabytes: int,
        sync: SyncConfig,
        device: torch.device,
    ) -> None:
        if not isinstance(gpu_memory_utilization, int | float) or not 0 < gpu_memory_utilization < 1:
            raise ValueError(f"gpu_memory_utilization={gpu_memory_utilization!r}: use a share of a GPU, such as 0.4.")
        allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
        if device.type == "cuda" and "expandable_segments:true" in allocator.lower():
            raise ValueError(
                f"PYTORCH_CUDA_ALLOC_CONF={allocator}: such memory cannot be shared with the engine. Leave out "
                "expandable_segments."
            )
        self.dtype = dtype
        folder, self.config = self._model(model, random_weights)
        self.ranks = engine_ranks(tensor_parallel_size, mesh)
        spec = LocalSpec(
            folder, self.config, len(self.ranks), dtype, gpu_memory_utilization, random_weights,
            device.type == "cuda", sync, engine,
        )  # fmt: skip
        self.launch = rollout_of(LOCAL).prepare_local(spec)
        self.bucket_bytes = check_bucket_megabytes(megabytes, megabytes) << 20
        self.words = repr((dtype, gpu_memory_utilization, random_weights, megabytes, sync, sorted(engine.items())))

    def _model(self, model: Any, random_weights: bool) -> tuple[str, Mapping[str, Any]]:
        """A folder with the model's ``config.json``, and what that says."""
        from transformers import AutoConfig, PretrainedConfig

        if isinstance(model, PretrainedConfig):
            if not random_weights:
                raise ValueError("random_weights=False: a config has no weights. Give model as a folder that has them.")
            self._folder = tempfile.TemporaryDirectory(prefix="verl-sync-model-")
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
