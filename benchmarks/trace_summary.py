# SPDX-License-Identifier: Apache-2.0
"""From the chrome traces of one sync to a small table: time per kernel, the device busy or idle, the host's stages.

The traces of trainer and engine have one clock, so the trainer's mark around the sync cuts both. Hazard: kernels of two
processes on one device take turns, and each is shown as running while it waits for its turn; so only the union of both
processes' kernels says how busy the device was.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WINDOW = "sync"
STAGE = "sync/"
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")
KEPT = 12  # rows per table: the rest is in the traces
NAME_LENGTH = 72
Span = tuple[float, float]


@dataclass(frozen=True)
class Event:
    """Something that ran from ``start`` to ``end``, in seconds of the machine's clock."""

    kind: str
    name: str
    start: float
    end: float
    thread: tuple[Any, Any]


def read(path: Path) -> list[Event]:
    """The completed events of a trace, by start; of two with one start the outer one first."""
    with gzip.open(path, "rt", encoding="utf-8") as text:
        trace = json.load(text)
    # without the leading digits, which are the same in all traces: a float holds no nanoseconds since 1970
    base = trace.get("baseTimeNanoseconds", 0) % 10**15 / 1e9
    events = []
    for entry in trace["traceEvents"]:
        if entry.get("ph") == "X" and entry.get("cat") in (*DEVICE, *HOST):
            start = base + entry["ts"] / 1e6
            thread = (entry["pid"], entry["tid"])
            events.append(Event(entry["cat"], entry["name"], start, start + entry["dur"] / 1e6, thread))
    return sorted(events, key=lambda event: (event.start, -event.end))


def union(spans: Iterable[Span]) -> list[Span]:
    """The spans with what overlaps joined."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def covered(spans: list[Span], window: Span) -> float:
    """Seconds of ``window`` in which a span of a union runs."""
    return sum(max(0.0, min(end, window[1]) - max(start, window[0])) for start, end in spans)


def own_seconds(events: Iterable[Event]) -> list[tuple[Event, float]]:
    """Each host event with its seconds less those of the events inside it, on its thread."""
    open_events: dict[Any, list[list[Any]]] = defaultdict(list)
    found: list[list[Any]] = []
    for event in events:
        stack = open_events[event.thread]
        while stack and stack[-1][0].end <= event.start:
            stack.pop()
        if stack:
            stack[-1][1] -= event.end - event.start
        stack.append([event, event.end - event.start])
        found.append(stack[-1])
    return [(event, max(0.0, seconds)) for event, seconds in found]


def _totals(events: Iterable[tuple[Event, float]]) -> list[dict[str, Any]]:
    """Seconds and count by name, the largest first."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event, seconds in events:
        totals[event.name][0] += 1
        totals[event.name][1] += seconds
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])[:KEPT]
    return [
        {"name": name[:NAME_LENGTH], "count": int(count), "seconds": round(seconds, 6)}
        for name, (count, seconds) in ordered
    ]


def _process(events: list[Event], window: Span) -> dict[str, Any]:
    inside = [event for event in events if event.end > window[0] and event.start < window[1]]
    device = [event for event in inside if event.kind in DEVICE]
    host = own_seconds(event for event in inside if event.kind in HOST)
    busy = union((event.start, event.end) for event in device)
    return {
        "device_busy_seconds": round(covered(busy, window), 6),
        "device": _totals((event, event.end - event.start) for event in device),
        "host": _totals((event, seconds) for event, seconds in host if event.kind != "user_annotation"),
    }


def _stages(trainer: list[Event], window: Span, busy: list[Span]) -> list[dict[str, Any]]:
    """Seconds by the trainer's stage, and how many of them the device was busy."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    spans = []
    for event in trainer:
        if event.kind == "user_annotation" and event.name.startswith(STAGE) and event.start >= window[0]:
            spans.append((event.start, event.end))
            row = found[event.name.removeprefix(STAGE)]
            row[0] += 1
            row[1] += event.end - event.start
            row[2] += covered(busy, spans[-1])
    joined = union(spans)
    if joined:
        on_device = sum(covered(busy, span) for span in joined)
        found["outside of these"] = [
            1,
            window[1] - window[0] - covered(joined, window),
            covered(busy, window) - on_device,
        ]
    return [
        {"name": name, "count": int(count), "seconds": round(seconds, 6), "device_busy_seconds": round(on_device, 6)}
        for name, (count, seconds, on_device) in found.items()
    ]


def summarize(trainer: Path, engines: list[Path]) -> dict[str, Any]:
    """The summary of one sync.

    Raises:
        ValueError: the trainer's trace has no mark around the sync.
    """
    own = read(trainer)
    marks = [event for event in own if event.kind == "user_annotation" and event.name == WINDOW]
    if not marks:
        raise ValueError(f"{trainer.name}: no mark {WINDOW!r}")
    window = (marks[0].start, marks[0].end)
    traces = {"trainer": own, **{f"engine {rank}": read(path) for rank, path in enumerate(engines)}}
    busy = union((event.start, event.end) for events in traces.values() for event in events if event.kind in DEVICE)
    seconds = window[1] - window[0]
    on_device = covered(busy, window)
    return {
        "seconds": round(seconds, 6),
        # without a device, or without leave to trace it, nothing is known of it
        "device_busy_share": round(on_device / seconds, 4) if busy else None,
        "device_busy_seconds": round(on_device, 6) if busy else None,
        "stages": _stages(own, window, busy),
        "processes": {name: _process(events, window) for name, events in traces.items()},
    }


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return ["", *lines, *("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def markdown(profile: dict[str, Any]) -> list[str]:
    """The lines of one profile."""
    busy = profile["device_busy_share"]
    lines = [f"## {profile['variant']}, {profile['bucket_mb']} MiB", ""]
    lines += [
        f"{_ms(profile['seconds'])} traced ({_ms(profile['unprofiled_seconds'])} otherwise); "
        + ("no device in the traces." if busy is None else f"device busy {busy:.0%}, idle {1 - busy:.0%}.")
    ]
    stages = [
        (row["name"], row["count"], _ms(row["seconds"]), _ms(row["device_busy_seconds"])) for row in profile["stages"]
    ]
    if stages:
        lines += _table(("stage of the trainer", "times", "seconds", "of these device busy"), stages)
    for name, process in profile["processes"].items():
        for kind in ("device", "host"):
            rows = [(row["name"], row["count"], _ms(row["seconds"])) for row in process[kind]]
            if rows:
                lines += _table((f"{name}: {kind}", "times", "seconds"), rows)
    return [*lines, ""]
