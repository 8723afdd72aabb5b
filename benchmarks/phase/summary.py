# SPDX-License-Identifier: Apache-2.0
"""One entry of a result's ``runs``, from the probe file and the log that a training leaves behind."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from benchmarks.phase import cases, parse, separate

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ROLLOUT = re.compile(r"response_length/mean:([0-9.eE+-]+).*?timing_s/gen:([0-9.eE+-]+)")
_TIMING = re.compile(r"timing_s/update_weights:([0-9.eE+-]+)")


def verl_timings(log: Path) -> list[float]:
    """verl's own ``timing_s/update_weights`` of each step: a second clock, independent of the probe."""
    return [float(value) for value in _TIMING.findall(_ANSI.sub("", log.read_text(encoding="utf-8", errors="replace")))]


def rollouts(settings: dict[str, Any], log: Path) -> list[dict[str, float]]:
    """Seconds and generated tokens of each step's rollout, from verl's console metrics."""
    text = _ANSI.sub("", log.read_text(encoding="utf-8", errors="replace"))
    device = settings.get("device", "cuda")
    responses = cases.batch_of(device) * cases.samples_of(device)
    return [
        {"seconds": float(seconds), "tokens": float(length) * responses} for length, seconds in _ROLLOUT.findall(text)
    ]


def _biggest(values: list[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def summarize(variant: str, settings: dict[str, Any], probe_file: Path, log: Path) -> dict[str, Any]:
    """One entry of ``runs``, from what the run left behind.

    Raises:
        ProbeError: the probe file is incomplete, or shows the other variant: verl drops a plugin that fails to load.
    """
    records = parse.read(probe_file)
    first, *measured = (separate.syncs if settings.get("rollout_gpus") else parse.syncs)(records)
    steps = settings.get("steps")  # what follows was run to be traced
    stock = parse.adapter_classes(records) == {parse.STOCK_ADAPTER}
    if stock != (variant == "stock"):
        raise parse.ProbeError(f"not a {variant} run: weights came from {sorted(parse.adapter_classes(records))}")
    return {
        "variant": variant,
        "settings": settings,
        "stages": parse.medians(measured[:steps]),
        "samples": {
            "first_sync": dataclasses.asdict(first),
            "syncs": [dataclasses.asdict(sync) for sync in measured[:steps]],
            "verl_update_weights_s": verl_timings(log)[:steps],
            "rollouts": rollouts(settings, log)[:steps],
        },
        "bytes": _biggest([sync.bytes for sync in (first, *measured[:steps])]),
        "peak_device_bytes": _biggest([sync.peak_device_bytes for sync in measured[:steps]]),
        "peak_host_bytes": max(sync.peak_host_bytes for sync in measured[:steps]),
    }
