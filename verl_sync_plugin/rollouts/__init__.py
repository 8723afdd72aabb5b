# SPDX-License-Identifier: Apache-2.0
"""Seam 2: the engines that generate. ``Rollout`` lists what the rest of the plugin asks of one.

An engine is a folder here, its line in ``ROLLOUTS``, and its pairs with trainers in ``sharding_manager.py``. Its
``__init__`` is its ``Rollout``. It also brings a server, a replica and an adapter for verl, ``EngineModel``
(``engine/model``) for its models, and a loader that runs ``ReceiverSession`` in every process of the engine.
What is of no engine lies next to the folders: ``adapter`` (verl's calls in the actor workers), ``gate`` (when requests
may be computed, and which memory is there) and ``process`` (an engine for a script).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from verl_sync_plugin.config.settings import SyncConfig

if TYPE_CHECKING:
    import torch

    from verl_sync_plugin.memory import Estimate

LOCAL = "sglang"  # the engine of scripts, see ``spmd/``
ROLLOUTS = {"sglang": "verl_sync_plugin.rollouts.sglang"}  # modules by verl's ``rollout.name``


@dataclass(frozen=True)
class LocalSpec:
    """An engine that a script wants for itself.

    Attributes:
        model: folder with the model's ``config.json``; weights too, unless ``random_weights``.
        config: the content of that file.
        tensor_parallel_size: of the engine.
        dtype: of its weights.
        gpu_memory_utilization: share of a device for weights and KV cache together.
        random_weights: the engine starts without the checkpoint's weights, and must be synced before it generates.
        cuda: it runs on GPUs; else on the CPU.
        sync: the settings of its syncs.
        arguments: more of the engine's own.
    """

    model: str
    config: Mapping[str, Any]
    tensor_parallel_size: int
    dtype: str
    gpu_memory_utilization: float
    random_weights: bool
    cuda: bool
    sync: SyncConfig
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LocalLaunch:
    """The start of a script's engine.

    Attributes:
        engine: the engine's name.
        module: what the process runs, see ``process.serve``.
        arguments: picklable; the first message that the process gets.
        environment: variables, unless the script's environment has them.
        restores_uncovered: see ``RolloutEndpoint``.
    """

    engine: str
    module: str
    arguments: tuple[Any, ...]
    environment: Mapping[str, str]
    restores_uncovered: bool


class Rollout(Protocol):
    """A module for one engine. Every process that imports verl's rollouts imports it, so it imports neither torch, verl
    nor the engine at its top.

    Attributes:
        NAME: verl's ``rollout.name``.
        ENGINE: the engine's name in messages.
        ADAPTER: our rollout adapter for the actor workers, by its whole name.
        STOCK_ADAPTER: verl's own, in whose place it is registered.
        STOCK_LOADER: the function in ``verl.workers.rollout.replica`` that imports verl's replica.
        LOADER: the module that the engine imports for its loads.
        DIGEST_LOADER: what the engine has to list as a weight loader for its server's ``digests`` to work.
        load_replica: imports our replica class, after verl's own preparation of the engine's imports.
        refuse_keys: raises ValueError, naming key, value and remedy, for what the engine cannot do of the rollout
            config (verl's; dataclass, DictConfig or dict) of a run whose weights the plugin moves.
        left_to_verl: key, value and reason of what the plugin cannot do of such a config and stock verl can; empty
            where there is nothing of the kind.
        refuse_stock: raises ValueError, naming key, value and remedy, where stock verl would put wrong weights into the
            engine with such a config and ``actor_rollout_ref.model``; returns a warning without its full stop, or "".
        refuse_checkpoint: as ``refuse_keys``, for the model of ``actor_rollout_ref.model.path`` where its checkpoint
            lies in a folder of this machine; further arguments are ``actor_rollout_ref.model.override_config`` and
            verl's rollout config.
        refuse_family: likewise for a path and the content of its ``config.json``.
        refuse_untied: raises ValueError for architectures whose embedding and head the engine cannot hold separately;
            its second argument says what adapts or trains one of the two.
        refuse_adapter: raises ValueError for fields of PEFT's ``LoraConfig`` that the engine cannot serve; its second
            argument says under which keys the user gave them.
        pack_adapter: settings and factors (by name; on the host) of an adapter to be served, as arguments of the
            server's ``load_adapter``, and the bytes that travel; raises ValueError for what cannot be served.
        generating_bytes: what generating takes on top of weights and KV cache, by the engine's own estimate.
        prepare_local: for ``spmd/``; raises ValueError naming argument, value and remedy.
    """

    NAME: str
    ENGINE: str
    ADAPTER: str
    STOCK_ADAPTER: str
    STOCK_LOADER: str
    LOADER: str
    DIGEST_LOADER: str

    def load_replica(self) -> type: ...
    def refuse_keys(self, rollout: Any) -> None: ...
    def left_to_verl(self, rollout: Any) -> str: ...
    def refuse_stock(self, rollout: Any, model: Any) -> str: ...
    def refuse_checkpoint(self, path: str, override_config: Any = None, rollout: Any = None) -> None: ...
    def refuse_family(self, path: str, config: Mapping[str, Any]) -> None: ...
    def refuse_untied(self, architectures: Iterable[str], where: str) -> None: ...
    def refuse_adapter(self, settings: Mapping[str, Any], keys: Mapping[str, str]) -> None: ...
    def pack_adapter(
        self, settings: Mapping[str, Any], factors: dict[str, torch.Tensor]
    ) -> tuple[tuple[Any, ...], int]: ...
    def generating_bytes(self, config: Any) -> Estimate: ...
    def prepare_local(self, spec: LocalSpec) -> LocalLaunch: ...


def serves(name: object) -> bool:
    """True if the plugin has a rollout for verl's ``rollout.name``."""
    return name in ROLLOUTS


def rollout_of(name: str) -> Rollout:
    """The rollout of that name, for which ``serves`` holds."""
    return cast(Rollout, importlib.import_module(ROLLOUTS[name]))
