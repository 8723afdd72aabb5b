# SPDX-License-Identifier: Apache-2.0
"""Before weights are written into an engine: what it computed with earlier ones is waited for, or forgotten; in the
engine's process."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch


def wait_for_forwards(model: torch.nn.Module) -> None:
    """Waits until no forward pass reads the weights any more.

    Paused ``in_place`` with its overlapping schedule, SGLang leaves the last forward pass running on a stream of its
    own. On an idle device this returns at once.
    """
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.is_cuda:
        torch.cuda.synchronize(parameter.device)


def forget_images() -> None:
    """Has SGLang forget what its vision tower made of images.

    It keeps that by image (``SGLANG_VLM_CACHE_SIZE_MB``, 100 by default), and its ``flush_cache`` leaves it there
    (sglang #36468): an image that was seen before would be answered with the earlier tower.
    """
    for name in ("mm_utils", "mm_schedule"):  # up to SGLang 0.5.17, and since
        cache = getattr(sys.modules.get(f"sglang.srt.managers.{name}"), "embedding_cache", None)
        if cache is not None:
            cache.clear()


def forget_prefixes() -> None:
    """Has the scheduler that is loading weights flush its prefix cache although requests wait.

    SGLang's ``retract`` gives back what a request has generated, but leaves its prompt in the prefix cache, where it
    finds it again when it goes on; and ``flush_cache`` refuses while any request waits, as all retracted ones do
    (sglang #33783). They hold nothing of the cache, so it is flushed with the queue out of sight. Every other
    condition of SGLang's stays.

    Raises:
        RuntimeError: SGLang could not flush, or this is not called from within its scheduler.
    """
    scheduler = loading_scheduler()
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
    try:
        flushed = scheduler.flush_cache()
    finally:
        scheduler.waiting_queue = waiting
    if not flushed:
        raise RuntimeError("SGLang could not flush its prefix cache after retracting its requests: some still run")


def loading_scheduler() -> Any:
    """SGLang hands a loader nothing but the model; the scheduler is among its callers."""
    from sglang.srt.managers.scheduler import Scheduler

    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), Scheduler):
            return owner
        frame = frame.f_back
    raise RuntimeError("no scheduler of SGLang's is loading weights here")
