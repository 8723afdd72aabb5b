# SPDX-License-Identifier: Apache-2.0
"""For ``PYTHONPATH``, by which all processes of a run load it: counts what takes part in each sync from the third on.

Notes files of the package that run, and collectives of the trainer. Parameters are moved to files at the start, which
SGLang's processes can map as they can all device memory.
"""

from __future__ import annotations

import concurrent.futures.thread as pool
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import wrapt

PACKAGE = f"{os.sep}verl_sync_plugin{os.sep}"
COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "all_to_all", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "scatter", "scatter_object_list"),
)
RUN = Path(os.environ.get("SYNC_TEST_RUN", os.devnull))
NUMBER = RUN / "number-of-the-sync"  # of those that are counted
FIRST = 3


@contextmanager
def _profiled(files: set[str]) -> Iterator[None]:
    """Notes the files of all calls in this thread, in threads that start meanwhile, and in pools of threads."""
    honest = pool._WorkItem.run  # type: ignore[attr-defined]

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    def run(item: Any) -> None:
        sys.setprofile(note)
        try:
            honest(item)
        finally:
            sys.setprofile(None)

    for frame in sys._current_frames().values():  # what other threads are in the midst of
        at: FrameType | None = frame
        while at is not None:
            files.add(at.f_code.co_filename)
            at = at.f_back
    pool._WorkItem.run = run  # type: ignore[attr-defined]
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        pool._WorkItem.run = honest  # type: ignore[attr-defined]


@contextmanager
def _rounds(calls: list[str]) -> Iterator[None]:
    """Notes the outermost collectives of torch.distributed, of any group."""
    import torch.distributed as dist

    inside = threading.local()

    def counted(name: str, honest: Any) -> Any:
        def collective(*args: Any, **more: Any) -> Any:
            outermost = not getattr(inside, "one", False)
            if outermost:
                calls.append(name)
            inside.one = True
            try:
                return honest(*args, **more)
            finally:
                inside.one = not outermost

        return collective

    honest = {name: getattr(dist, name) for name in COLLECTIVES}
    for name, function in honest.items():
        setattr(dist, name, counted(name, function))
    try:
        yield
    finally:
        for name, function in honest.items():
            setattr(dist, name, function)


@contextmanager
def _noted(role: str) -> Iterator[None]:
    files: set[str] = set()
    calls: list[str] = []
    with _rounds(calls), _profiled(files):
        yield
    ours = sorted(name.rpartition(PACKAGE)[2] for name in files if PACKAGE in name)
    entry = json.dumps({"sync": int(NUMBER.read_text()), "role": role, "files": ours, "rounds": calls})
    with open(RUN / "counted.jsonl", "a") as output:  # one short line per process and request
        output.write(entry + "\n")


def _in_the_trainer(workers: ModuleType) -> None:
    build = workers.ActorRolloutRefWorker.__init__

    def __init__(self: Any, *args: Any, **more: Any) -> None:
        build(self, *args, **more)
        sync, syncs = self.update_weights, 0

        async def update_weights(*args: Any, **more: Any) -> Any:
            nonlocal syncs
            syncs += 1
            if syncs < FIRST:
                return await sync(*args, **more)
            NUMBER.write_text(str(syncs))
            with _noted("trainer"):
                return await sync(*args, **more)

        self.update_weights = update_weights

    workers.ActorRolloutRefWorker.__init__ = __init__


def _in_the_engine(module: ModuleType) -> None:
    def noting(honest: Any) -> Any:
        def request(*args: Any, **more: Any) -> Any:
            if not NUMBER.exists():
                return honest(*args, **more)
            with _noted("engine"):
                return honest(*args, **more)

        return request

    for name in ("update_weights_from_tensor", "resume_memory_occupation"):
        setattr(module.Scheduler, name, noting(getattr(module.Scheduler, name)))


def _shared(module: ModuleType) -> None:
    initialize = module.FSDPEngine.initialize

    def sharing(self: Any) -> None:
        from bare_engine.trainer import share

        initialize(self)
        share(self, RUN)

    module.FSDPEngine.initialize = sharing


if RUN.is_dir():
    wrapt.register_post_import_hook(_in_the_trainer, "verl.workers.engine_workers")
    wrapt.register_post_import_hook(_shared, "verl.workers.engine.fsdp.transformer_impl")
    wrapt.register_post_import_hook(_in_the_engine, "sglang.srt.managers.scheduler")
