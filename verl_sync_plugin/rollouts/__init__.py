# SPDX-License-Identifier: Apache-2.0
"""The engines that generate. ``Rollout`` lists what the rest of the plugin asks of one.

An engine is a folder here, whose ``__init__`` is its ``Rollout``, its line in ``ROLLOUTS``, and its pairs with trainers
in ``sharding_manager.py``. It brings a server, a replica and an adapter for verl, an ``EngineModel`` (``engine/model``)
and a loader that runs ``ReceiverSession`` in every process of the engine. Of no engine are ``adapter`` (verl's calls in
the actor workers), ``gate`` (when requests may be computed) and ``process`` (an engine for a script).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from verl_sync_plugin.config.settings import SyncConfig

if TYPE_CHECKING:
    import torch

LOCAL = "sglang"  # the engine of scripts, see ``spmd.py``
ROLLOUTS = {"sglang": "verl_sync_plugin.rollouts.sglang"}  # modules by verl's ``rollout.name``


@dataclass(frozen=True)
class LocalSpec:
    """An engine that a script wants for itself."""

    model: str  # folder with the model's ``config.json``; weights too, unless ``random_weights``
    config: Mapping[str, Any]  # the content of that file
    tensor_parallel_size: int
    dtype: str
    gpu_memory_utilization: float  # share of a device for weights and KV cache together
    random_weights: bool  # it starts without the checkpoint's weights, and must be synced before it generates
    cuda: bool  # it runs on GPUs; else on the CPU
    sync: SyncConfig
    arguments: Mapping[str, Any] = field(default_factory=dict)  # more of the engine's own


@dataclass(frozen=True)
class LocalLaunch:
    """The start of a script's engine."""

    engine: str  # its name
    module: str  # what the process runs, see ``process.serve``
    arguments: tuple[Any, ...]  # picklable; the first message that the process gets
    environment: Mapping[str, str]  # variables, unless the script's environment has them


class Rollout(Protocol):
    """A module for one engine, which imports neither torch, verl nor the engine at its top: every process that imports
    verl's rollouts imports it. What refuses raises ValueError, which names key, value and remedy."""

    ENGINE: str  # the engine's name in messages
    ADAPTER: str  # our rollout adapter for the actor workers, by its whole name
    STOCK_ADAPTER: str  # verl's own, in whose place it is registered
    STOCK_LOADER: str  # the function in ``verl.workers.rollout.replica`` that imports verl's replica
    LOADER_MODULE: str  # the module that the engine imports for its loads

    def load_replica(self) -> type:
        """Imports our replica class, after verl's own preparation of the engine's imports."""

    def refuse_keys(self, rollout: Any) -> None:
        """Refuses what the engine cannot do of verl's rollout config (dataclass, DictConfig or dict)."""

    def left_to_verl(self, rollout: Any) -> str:
        """Key, value and reason of what the plugin cannot do of it and stock verl can; empty where there is nothing."""

    def refuse_quantization(self, rollout: Any, model: Any) -> None:
        """Refuses a ``rollout.quantization`` that the engine cannot follow, with this model's keys."""

    def refuse_checkpoint(self, path: str, key: str = "", overrides: Any = None, rollout: Any = None) -> None:
        """As ``refuse_family``, by a folder of this machine; also where the trainer's ``overrides`` of its model, by
        ``key``, and verl's rollout config give trainer and engine different numbers of layers."""

    def refuse_family(self, path: str, config: Mapping[str, Any], rollout: Any = None) -> None:
        """Refuses a model by the content of its ``config.json``, with verl's rollout config."""

    def refuse_adapter(self, settings: Mapping[str, Any], keys: Mapping[str, str]) -> None:
        """Refuses fields of PEFT's ``LoraConfig`` that the engine cannot serve; ``keys``: the user's, by field."""

    def pack_adapter(
        self, settings: Mapping[str, Any], factors: dict[str, torch.Tensor]
    ) -> tuple[tuple[Any, ...], int]:
        """An adapter to be served (its factors by name, on the host) as arguments of the server's ``load_adapter``, and
        the bytes that travel; refuses what it cannot serve."""

    def prepare_local(self, spec: LocalSpec) -> LocalLaunch:
        """For ``spmd.py``."""


def rollout_of(name: str) -> Rollout:
    return cast(Rollout, importlib.import_module(ROLLOUTS[name]))
