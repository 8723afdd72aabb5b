# SPDX-License-Identifier: Apache-2.0
"""Makes the change that ``SYNC_TEST_CHANGE`` names in each process of a run (``VERL_USE_EXTERNAL_MODULES``)."""

import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import wrapt

CHANGE = "SYNC_TEST_CHANGE"
DYING_REPLICA, DYING_SYNC = 2, 3  # of the last replica of two of a separate rollout, after the second step
DRIFTING_STEP = 4
HONEST_SYNCS, VICTIM = 3, "model.layers.1.mlp.down_proj.weight"


def drifting_trainer(transformer_impl: ModuleType) -> None:
    """The trainer's weights change before the log-probabilities of the fourth step, as no step of training does."""
    steps = itertools.count(1)

    def infer_batch(honest: Any, engine: Any, args: Any, more: Any) -> Any:
        if next(steps) == DRIFTING_STEP:
            for parameter in engine.module.parameters():
                parameter.data.mul_(1.5)
        return honest(*args, **more)

    wrapt.wrap_function_wrapper(transformer_impl, "FSDPEngine.infer_batch", infer_batch)


def dying_engine(updates: ModuleType) -> None:
    """A scheduler of SGLang dies in one replica of a separate rollout, while that is being synced."""
    import psutil

    honest = updates.WeightUpdates.load_weights

    async def load_weights(self: Any, *args: Any) -> Any:
        self.loads_begun = getattr(self, "loads_begun", 0) + 1
        if self.replica_rank == DYING_REPLICA and self.loads_begun == DYING_SYNC:
            named = {process.pid: psutil.Process(process.pid).name() for process in self._processes}
            (scheduler,) = (pid for pid, name in named.items() if "scheduler" in name)
            os.kill(scheduler, signal.SIGKILL)
        return await honest(self, *args)

    updates.WeightUpdates.load_weights = load_weights


def noting_pauses(updates: ModuleType) -> None:
    """Has a separate server say after a pause who paused it, and how many requests stayed; all responses are long."""

    def note(server: Any) -> None:
        """Changes the server's class as it is defined, since Ray takes its methods at once."""
        if "abort_all_requests" not in vars(server):
            return
        pause, resume, generate = server.abort_all_requests, server.resume_generation, server.generate

        async def generating(self: Any, *args: Any, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            return await generate(self, *args, sampling_params={**sampling_params, "ignore_eos": True}, **kwargs)

        async def abort_all_requests(self: Any, *args: Any, **kwargs: Any) -> Any:
            answer = await pause(self, *args, **kwargs)
            self.requests_inside = set(self.tokenizer_manager.rid_to_state)
            return answer

        async def resume_generation(self: Any) -> None:
            who = "its load" if self.paused_by_load else "a driver"
            stayed = getattr(self, "requests_inside", set()) & set(self.tokenizer_manager.rid_to_state)
            await resume(self)
            if self.separate:
                print(f"[e2e] paused by {who}, {len(stayed)} requests stayed", flush=True)

        server.abort_all_requests, server.resume_generation = abort_all_requests, resume_generation
        server.generate = generating

    updates.WeightUpdates.__init_subclass__ = classmethod(note)


def teacher_sampling(manager: ModuleType) -> None:
    """Keeps ``detokenize`` from a teacher: verl 0.9.1 asks it for that, and SGLang 0.5.12 does not know it."""

    def known(honest: Any, _: Any, args: Any, more: Any) -> dict[str, Any]:
        return {key: value for key, value in honest(*args, **more).items() if key != "detokenize"}

    wrapt.wrap_function_wrapper(manager, "_get_teacher_sampling_params", known)


def say_version(module: ModuleType) -> None:
    print(f"[e2e] {module.__name__} {module.__version__} from {module.__file__}", flush=True)


def watched_tower(transformer_impl: ModuleType, frozen: bool = False) -> None:
    """Says how many parameters a step changed; may freeze the tower, since verl 0.9.1 does not read its own key."""

    def parts(module: Any) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"tower": [], "language": []}
        for name, parameter in module.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            found["tower" if "visual." in name else "language"].append(local.detach().clone())
        return found

    def build(honest: Any, engine: Any, args: Any, more: Any) -> Any:
        if frozen:
            args[0].model.visual.requires_grad_(False)
        return honest(*args, **more)

    def step(honest: Any, engine: Any, args: Any, more: Any) -> Any:
        before = parts(engine.module)
        result = honest(*args, **more)
        after = parts(engine.module)
        for part, tensors in before.items():
            changed = sum(not old.equal(new) for old, new in zip(tensors, after[part], strict=True))
            print(f"[e2e] {part}: {changed} of {len(tensors)} parameters changed", flush=True)
        return result

    for name, wrapper in (("_build_fsdp_module", build), ("optimizer_step", step)):
        wrapt.wrap_function_wrapper(transformer_impl, f"FSDPEngine.{name}", wrapper)


def wrong_shape(fsdp2: ModuleType) -> None:
    """Describes a tensor wrongly from the fourth sync on: SGLang's ``load_weights`` refuses it in mid-sync."""
    calls = itertools.count(1)

    def transposed(shard: Any) -> Any:
        views = tuple(replace(v, shape=v.shape[::-1]) if v.name == VICTIM else v for v in shard.base.views)
        return replace(shard, base=replace(shard.base, views=views))

    def shards(honest: Any, source: Any, args: Any, more: Any) -> list[Any]:
        found: list[Any] = honest(*args, **more)
        return found if next(calls) <= HONEST_SYNCS else [transposed(shard) for shard in found]

    wrapt.wrap_function_wrapper(fsdp2, "FSDP2Source.shards", shards)


CHANGES: dict[str, dict[str, Callable[[ModuleType], None]]] = {
    "drifting_trainer": {"verl.workers.engine.fsdp.transformer_impl": drifting_trainer},
    "dying_engine": {"verl_sync_plugin.rollouts.sglang.updates": dying_engine},
    "noting_pauses": {"verl_sync_plugin.rollouts.sglang.updates": noting_pauses},
    "teacher_sampling": {"verl.experimental.teacher_loop.teacher_manager": teacher_sampling},
    "versions": {"verl": say_version, "sglang": say_version},
    "trained_tower": {"verl.workers.engine.fsdp.transformer_impl": watched_tower},
    "frozen_tower": {"verl.workers.engine.fsdp.transformer_impl": partial(watched_tower, frozen=True)},
    "wrong_shape": {"verl_sync_plugin.trainers.fsdp2": wrong_shape},
}

for _name, _change in CHANGES[os.environ[CHANGE]].items():
    wrapt.register_post_import_hook(_change, _name)
