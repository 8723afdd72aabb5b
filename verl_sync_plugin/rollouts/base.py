# SPDX-License-Identifier: Apache-2.0
"""What the plugin asks about a rollout engine in processes that hold none: the driver's, and those that register."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.lora.refusals import RefuseUntied
from verl_sync_plugin.lora.settings import RefuseAdapter

if TYPE_CHECKING:
    from verl_sync_plugin.sync.endpoint import RolloutEndpoint


@dataclass(frozen=True)
class LocalSpec:
    """An engine that a script wants for itself.

    Attributes:
        model: folder with the model's ``config.json``; weights too, unless ``random_weights``.
        config: what is in that file.
        tensor_parallel_size: of the engine.
        dtype: of its weights.
        gpu_memory_utilization: share of a device for weights and KV cache together.
        random_weights: it starts without the checkpoint's, and has to be synced before it generates.
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


class LocalEngineProcess(Protocol):
    """A process with an engine in it.

    Attributes:
        ready: done when the engine answers, with an error when it could not be launched.
    """

    ready: Future[None]

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """Calls ``generate``, ``release``, ``resume``, ``abort``, ``check_weights`` or ``digests`` of the engine's
        server; returns at once."""

    def close(self) -> None:
        """Ends the engine; harmless when it has ended."""


class LocalLaunch(Protocol):
    """What is known of an engine for a script before it runs."""

    def start(self, devices: Sequence[str]) -> LocalEngineProcess:
        """Starts it; returns at once.

        Args:
            devices: what its GPUs are called in ``CUDA_VISIBLE_DEVICES``, in tensor-parallel order; none on a CPU.
        """

    def endpoint(self, engine: Any, ranks: tuple[int, ...]) -> RolloutEndpoint:
        """One rank's view of it.

        Args:
            engine: what ``start`` returned, on the leader; ``None`` on the others.
            ranks: see ``RolloutEndpoint``.
        """


@dataclass(frozen=True)
class Rollout:
    """One rollout engine. The module that makes it imports neither torch, verl nor the engine at its top: every process
    that imports verl's rollouts imports it.

    Attributes:
        name: verl's ``rollout.name``.
        engine: the engine's name in messages.
        adapter: our rollout adapter for the actor workers, by its whole name.
        stock_adapter: verl's own, in whose place it is registered.
        load_replica: imports our replica class, after verl's own preparation of the engine's imports.
        stock_loader: the function in ``verl.workers.rollout.replica`` that imports verl's.
        refuse_keys: raises ValueError, naming key, value and remedy, for what the engine cannot do of verl's rollout
            config (dataclass, DictConfig or dict); its second argument says whether the plugin moves the weights, or
            verl's checkpoint engines do.
        left_to_verl: key, value and reason of what the plugin cannot do of such a config and stock verl can; empty
            where there is nothing of the kind.
        refuse_stock: raises ValueError, naming key, value and remedy, where with such a config and
            ``actor_rollout_ref.model`` stock verl would put wrong weights into the engine; returns what else is to be
            said of them, as a sentence without its point.
        refuse_checkpoint: as ``refuse_keys``, for the model of ``actor_rollout_ref.model.path``, where its checkpoint
            lies in a folder of this machine; further arguments are ``actor_rollout_ref.model.override_config`` and
            verl's rollout config.
        refuse_untied: see ``RolloutEndpoint.refuse_untied``.
        refuse_adapter: see ``RolloutEndpoint.refuse_adapter``; its second argument tells under which key, with its
            value, the user gave a setting, for the message.
        digest_loader: what the engine has to list as a weight loader for ``digests`` to work.
        prepare_local: for ``spmd/``; raises ValueError for what the engine cannot do, naming argument, value and
            remedy.
    """

    name: str
    engine: str
    adapter: str
    stock_adapter: str
    load_replica: Callable[[], type]
    stock_loader: str
    refuse_keys: Callable[[Any, bool], None]
    left_to_verl: Callable[[Any], str]
    refuse_stock: Callable[[Any, Any], str]
    refuse_checkpoint: Callable[..., None]
    refuse_untied: RefuseUntied
    refuse_adapter: RefuseAdapter
    digest_loader: str
    prepare_local: Callable[[LocalSpec], LocalLaunch]
