# SPDX-License-Identifier: Apache-2.0
"""The actor workers: verl's own, with the colocated sync's order of steps.

verl's ``update_weights`` empties the device's cache at both ends, offloads, synchronizes and meets in a barrier. Here
each is done when it is needed, timed, and a failure on one rank is everybody's. Other backends, other rollouts and a
plugin that is switched off go to verl's own method.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_torch_device, set_expandable_segments
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_sync_plugin.log import say_unused


class SyncWorkerMixin:
    """Replaces ``update_weights`` of a worker of verl; comes before verl's class among the bases."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self: Any, global_steps: int | None = None, mode: str = "auto", **more: Any) -> Any:
        """verl's contract: the rollout sleeps before and is awake after. A served adapter's base is the sharding
        manager's affair, so verl's ``sleep_level`` stays as it is."""
        backend = mode if mode != "auto" else self.config.rollout.checkpoint_engine.backend
        rollout = self.rollout
        # Hazard: the adapter's class is not imported here. SGLang would come with it, before the actor's model is
        # built, and what it changes in torch and transformers would then reach the trainer.
        if backend != "naive" or not getattr(rollout, "makes_room", False):
            return await super().update_weights(global_steps=global_steps, mode=mode, **more)  # type: ignore[misc]
        say_unused("update_weights", more)
        engine = self.actor.engine
        with sending(engine):
            rollout.make_room_for_weights(engine.is_param_offload_enabled)
            if self.config.rollout.free_cache_engine and getattr(rollout, "sleep_level", 2) != 1:
                await rollout.resume(tags=["weights"])
            weights, _ = engine.get_per_tensor_param(layered_summon=self.layered_summon, base_sync_done=True)
            await rollout.update_weights(weights, global_steps=global_steps, ends=False)
            await rollout.make_room_for_rest(lambda: offload(engine))
            await rollout.end_sync()
        self.base_sync_done = True
        return None


class SyncActorRolloutRefWorker(SyncWorkerMixin, ActorRolloutRefWorker):
    """Adds the phase to trainers that are colocated with the rollout."""


class SyncDetachActorWorker(SyncWorkerMixin, DetachActorWorker):
    """The worker of verl's ``separate_async`` trainer, whose hybrid replicas are colocated."""


OURS: dict[type, type] = {ActorRolloutRefWorker: SyncActorRolloutRefWorker, DetachActorWorker: SyncDetachActorWorker}


@contextmanager
def sending(engine: Any) -> Iterator[None]:
    """Around a sync, which reads a trainer's parameters where they are, on the host as well."""
    set_expandable_segments(False)  # other processes cannot open such memory
    try:
        yield
    finally:
        with suppress(Exception):  # a stream that loaded the model for the sync must not leave it on the device
            offload(engine)
        set_expandable_segments(True)


def offload(engine: Any) -> None:
    """Moves what is on the device of an engine with ``param_offload`` to the host, where the next step expects it.
    Usually nothing is: the sync reads offloaded parameters in host memory. verl's own call would then empty the cache.
    """
    if not engine.is_param_offload_enabled:
        return
    modules = engine.module if isinstance(engine.module, list) else [engine.module]
    if not any(_has_bytes(parameter) for module in modules for parameter in module.parameters()):
        return
    engine.to("cpu", model=True, optimizer=False, grad=False)
    # The copies are asynchronous; the next sync reads their targets on the host
    get_torch_device().synchronize()


def _has_bytes(parameter: torch.Tensor) -> bool:
    """True if it has bytes on a device. Megatron empties the storage of offloaded ones."""
    local: torch.Tensor = getattr(parameter, "_local_tensor", parameter)  # a DTensor has no storage of its own
    return local.device.type != "cpu" and local.untyped_storage().nbytes() > 0
