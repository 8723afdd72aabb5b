# SPDX-License-Identifier: Apache-2.0
"""Counts files of the package and collectives in each sync from the third on; parameters lie in files, to be mapped."""

import concurrent.futures.thread as pool
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

from wrapt import register_post_import_hook, wrap_function_wrapper

PACKAGE = f"{os.sep}verl_sync_plugin{os.sep}"
COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "all_to_all", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "scatter", "scatter_object_list"),
)
RUN = Path(os.environ.get("SYNC_TEST_RUN", os.devnull))
NUMBER = RUN / "number-of-the-sync"  # of those that are counted
FIRST = 3
_noted = SimpleNamespace(on=False, files=set(), rounds=[], inside=threading.local())


@contextmanager
def _noting(role: str) -> Iterator[None]:
    """Notes the files of all calls in this thread, in threads that start meanwhile, and in pools of threads."""
    _noted.on, _noted.files, _noted.rounds = True, set(), []
    for frame in sys._current_frames().values():  # what other threads are in the midst of
        at: FrameType | None = frame
        while at is not None:
            _noted.files.add(at.f_code.co_filename)
            at = at.f_back
    threading.setprofile(_call)
    sys.setprofile(_call)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        _noted.on = False
    ours = sorted(name.rpartition(PACKAGE)[2] for name in _noted.files if PACKAGE in name)
    entry = {"sync": int(NUMBER.read_text()), "role": role, "files": ours, "rounds": _noted.rounds}
    with open(RUN / "counted.jsonl", "a") as output:  # one short line per process and request
        output.write(json.dumps(entry) + "\n")


def _call(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call":
        _noted.files.add(frame.f_code.co_filename)


def _in_a_pool(honest: Any, item: Any, args: Any, more: Any) -> Any:
    sys.setprofile(_call if _noted.on else None)
    try:
        return honest(*args, **more)
    finally:
        sys.setprofile(None)


def _collective(honest: Any, group: Any, args: Any, more: Any) -> Any:
    """One of torch.distributed or of our ranks, of any group; those that it makes itself are not counted."""
    if not _noted.on or getattr(_noted.inside, "one", False):
        return honest(*args, **more)
    _noted.rounds.append(honest.__name__)
    _noted.inside.one = True
    try:
        return honest(*args, **more)
    finally:
        _noted.inside.one = False


def _in_the_trainer(workers: ModuleType) -> None:
    import torch.distributed as dist

    def build(honest: Any, worker: Any, args: Any, more: Any) -> None:
        honest(*args, **more)
        sync, syncs = worker.update_weights, 0

        async def update_weights(*args: Any, **more: Any) -> Any:
            nonlocal syncs
            syncs += 1
            if syncs < FIRST:
                return await sync(*args, **more)
            NUMBER.write_text(str(syncs))
            with _noting("trainer"):
                return await sync(*args, **more)

        worker.update_weights = update_weights

    for name in COLLECTIVES:
        wrap_function_wrapper(dist, name, _collective)
    for name in ("all_reduce", "gather", "broadcast_object"):
        wrap_function_wrapper("verl_sync_plugin.transport.agreement", f"Ranks.{name}", _collective)
    wrap_function_wrapper(workers, "ActorRolloutRefWorker.__init__", build)


def _in_the_engine(module: ModuleType) -> None:
    def request(honest: Any, scheduler: Any, args: Any, more: Any) -> Any:
        if not NUMBER.exists():
            return honest(*args, **more)
        with _noting("engine"):
            return honest(*args, **more)

    for name in ("update_weights_from_tensor", "resume_memory_occupation"):
        wrap_function_wrapper(module, f"Scheduler.{name}", request)


def _shared(module: ModuleType) -> None:
    def sharing(honest: Any, engine: Any, args: Any, more: Any) -> None:
        from bare_engine.trainer import share

        honest(*args, **more)
        share(engine, RUN)

    wrap_function_wrapper(module, "FSDPEngine.initialize", sharing)


if RUN.is_dir():
    wrap_function_wrapper(pool, "_WorkItem.run", _in_a_pool)
    register_post_import_hook(_in_the_trainer, "verl.workers.engine_workers")
    register_post_import_hook(_shared, "verl.workers.engine.fsdp.transformer_impl")
    register_post_import_hook(_in_the_engine, "sglang.srt.managers.scheduler")
