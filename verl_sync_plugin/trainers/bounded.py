# SPDX-License-Identifier: Apache-2.0
"""Waits for collectives and devices with a bound, whatever the process group's own timeout is."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist


def take_part(work: dist.Work, device: torch.device, seconds: float) -> None:
    """Waits for a collective that was started with ``async_op=True``.

    On a GPU this only orders streams and does not block the host; who waits for the result there does so with a bound,
    see ``reached`` and ``BucketSender.drain``.

    Raises:
        RuntimeError: another rank did not take part in time.
    """
    if device.type == "cuda":
        work.wait()
    else:
        work.wait(timedelta(seconds=seconds))


def reached(device: torch.device, seconds: float) -> None:
    """Waits until a device has done all that was given to it, like ``synchronize``, but with a bound: a rank that died
    leaves NCCL hanging.

    Raises:
        TimeoutError: the bound has passed.
    """
    if device.type != "cuda":
        return
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the device did not finish gathering LoRA factors within {seconds:g} s")
        time.sleep(2e-4)
