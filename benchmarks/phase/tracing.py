# SPDX-License-Identifier: Apache-2.0
"""Traces of the last sync of a training, on the device of rank 0: the trainer's call and the engine's scheduler.

The probe calls ``around`` in every trainer process; without ``$SYNC_PROBE_PROFILE`` it does nothing. A trace that
cannot be taken must not end a training: the reason goes to the log, and ``collect`` finds nothing.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks import gauges, trace_summary

FOLDER = "SYNC_PROBE_PROFILE"
NUMBERS = "SYNC_PROBE_PROFILE_SYNCS"
EXTRA_SYNCS = 2  # one that pays for the profilers' start, and the one whose traces count
SUFFIX = ".trace.json.gz"

_syncs = 0
_tracing = False


def environment(folder: Path, steps: int) -> dict[str, str]:
    """What the training's environment needs: the syncs after the measured ones are traced. Empties ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return {FOLDER: str(folder), NUMBERS: f"{steps + 1},{steps + 2}"}


def _post(address: str, port: int, path: str, body: dict[str, Any]) -> None:
    connection = http.client.HTTPConnection(address, port, timeout=120)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {answer.read()[:300]!r}")
    finally:
        connection.close()


async def _ask(owner: Any, path: str, body: dict[str, Any]) -> None:
    """One request to the engine of this worker's rollout."""
    await owner.rollout._init_server_adapter()
    address, port = await owner.rollout.server_actor.get_server_address.remote()
    await asyncio.to_thread(_post, str(address), int(port), path, body)


@asynccontextmanager
async def _traced(owner: Any, folder: Path, number: int) -> AsyncIterator[None]:
    from torch.profiler import ProfilerActivity, profile, record_function

    from benchmarks.profiling import marked_stages

    global _tracing
    cuda = gauges.current_device() is not None
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    body = {"output_dir": str(folder), "activities": ["CPU", *(["GPU"] if cuda else [])], "with_stack": False}
    await _ask(owner, "/start_profile", {**body, "record_shapes": False, "profile_prefix": f"sync{number}-engine"})
    try:
        with profile(activities=activities) as profiler, marked_stages():
            gauges.synchronize()
            _tracing = True
            with record_function(trace_summary.WINDOW):
                yield
                gauges.synchronize()
    finally:
        _tracing = False
        await _ask(owner, "/stop_profile", {})
    profiler.export_chrome_trace(str(folder / f"sync{number}-trainer{SUFFIX}"))


@asynccontextmanager
async def around(owner: Any, event: str) -> AsyncIterator[None]:
    """Around one call of the probe's: ``sync`` is the trainer's whole ``update_weights``, others are parts of it."""
    global _syncs
    if event != "sync" and _tracing:
        from torch.profiler import record_function

        with record_function(f"{trace_summary.STAGE}call of {event}"):
            yield
        return
    number, _syncs = _syncs, _syncs + (event == "sync")
    wanted = os.environ.get(FOLDER) and event == "sync" and os.environ.get("RANK", "0") == "0"
    if not wanted or str(number) not in os.environ.get(NUMBERS, "").split(","):
        yield
        return
    trace = _traced(owner, Path(os.environ[FOLDER]), number)
    try:
        await trace.__aenter__()
    except Exception:
        print(f"no trace of sync {number}:\n{traceback.format_exc()}", flush=True)
        yield
        return
    yield
    try:
        await trace.__aexit__(None, None, None)
    except Exception:
        print(f"trace of sync {number} is lost:\n{traceback.format_exc()}", flush=True)


def collect(folder: Path, out: Path, stem: str) -> dict[str, Any]:
    """Moves the traces of the last traced sync into ``out`` and summarizes them.

    Raises:
        ValueError: there are none; the training's log says why.
    """
    trainers = sorted(folder.glob(f"sync*-trainer{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    number = trainers[-1].name.partition("-")[0] if trainers else ""
    # the first scheduler shares its device with rank 0
    engines = sorted(folder.glob(f"{number}-engine-*-TP-0*{SUFFIX}")) if number else []
    if not engines:
        raise ValueError(f"no traces in {folder.name}; the training's log says why")
    out.mkdir(parents=True, exist_ok=True)
    trainer, engine = out / f"{stem}-trainer{SUFFIX}", out / f"{stem}-engine0{SUFFIX}"
    trainer.write_bytes(trainers[-1].read_bytes())
    engine.write_bytes(engines[0].read_bytes())
    return trace_summary.summarize(trainer, [engine])
