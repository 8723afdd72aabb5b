# SPDX-License-Identifier: Apache-2.0
"""Wraps the real methods of each stage as fault points; the next call of one fails once ``arm`` has named it."""

import functools
import importlib
import inspect
import json
import os
import signal
import time
from typing import Any

import torch

SLOW_SECONDS = 1.5
SIGNAL_SECONDS = 0.2  # a signal may reach another thread first, and this one would go on for a moment

# Per place and stage: module, the attribute to be wrapped, and a value that must be among the arguments (or "")
Point = tuple[str, str, str]
_SENDER = "verl_sync_plugin.sync.sender"
_ENDPOINT = "verl_sync_plugin.sync.endpoint"
_SERVER = "verl_sync_plugin.rollouts.sglang.server"
_SESSION = "verl_sync_plugin.engine.session"
_LOAD = "verl_sync_plugin.engine.load"
_SAVER = "sglang.srt.utils.torch_memory_saver_adapter"
_LEADER: dict[str, tuple[Point, ...]] = {
    "plan": (("verl_sync_plugin.trainers.fsdp2", "FSDP2Source.shards", ""),),
    "wake": ((_ENDPOINT, "RolloutEndpoint.resume", ""),),
    "connect": ((_ENDPOINT, "EngineConnection._accept", ""),),
    "pack": ((_SENDER, "BucketSender.pack", ""), (_SENDER, "BucketSender.hash_parameters", "")),
    "hand over": ((_SENDER, "BucketSender.load", ""),),
    "load": ((_SENDER, "BucketSender.wait_loaded", ""),),
    "commit": ((_SENDER, "BucketSender.commit", ""),),
    "verify": (("verl_sync_plugin.sync.manager", "refuse_changed", ""),),
    "compare": (("verl_sync_plugin.verify", "Comparison.weighed", ""),),
    "finish": ((_ENDPOINT, "RolloutEndpoint.finish", ""),),
}
# Where each stage can fail: on the trainer rank that leads its engine, on the other one, on the last engine rank (a
# scheduler of SGLang) and in the rollout server. "verify" tells what the engine's parameters hold; "compare" judges it
POINTS: dict[str, dict[str, tuple[Point, ...]]] = {
    "leader": _LEADER,
    "trainer": {
        **_LEADER,
        "wake": (("verl_sync_plugin.sync.manager", "note_device_memory", "asleep"),),
        "finish": (("verl_sync_plugin.rollouts.adapter", "note_device_memory", ""),),
    },
    "engine": {
        "plan": ((_LOAD, "ModelLoad.begin", ""),),
        "wake": ((_SAVER, "_TorchMemorySaverAdapterNoop.resume", "weights"),),
        "connect": (("verl_sync_plugin.rollouts.sglang.loader", "connect", ""),),
        "hand over": ((_SESSION, "ReceiverSession._open_staged", ""), (_SESSION, "ReceiverSession._open_in_place", "")),
        "load": ((_LOAD, "ModelLoad.load", ""), (_LOAD, "ModelLoad.load_in_place", "")),
        "commit": ((_SESSION, "ReceiverSession._commit", ""),),
        "verify": ((_LOAD, "ModelLoad.held", ""),),
        "finish": ((_SAVER, "_TorchMemorySaverAdapterNoop.resume", "kv_cache"),),
    },
    "server": {
        "wake": ((_SERVER, "SyncSGLangHttpServer.resume_tags", "weights"),),
        "connect": ((_SERVER, "SyncSGLangHttpServer.load_weights", ""),),
        "commit": (("sglang.srt.managers.tokenizer_manager", "TokenizerManager.update_weights_from_tensor", "behind"),),
        "finish": ((_SERVER, "SyncSGLangHttpServer.finish_sync", ""),),
    },
}

_armed: list[tuple[str, str, str]] = []  # place, stage and kind of the next fault of this process, if there is one
_installed: set[str] = set()


class InjectedError(RuntimeError):
    """The error of a fault."""


def install(place: str) -> None:
    """Wraps all points of a place in this process, once."""
    if place in _installed:
        return
    _installed.add(place)
    for stage, points in POINTS[place].items():
        for module, path, wanted in points:
            owner: Any = importlib.import_module(module)
            *classes, name = path.split(".")
            for each in classes:
                owner = getattr(owner, each)
            wrap(owner, name, place, stage, wanted)


def wrap(owner: Any, name: str, place: str, stage: str, wanted: str = "") -> None:
    """Makes one more method a point."""
    setattr(owner, name, _wrapped(getattr(owner, name), place, stage, wanted))


def arm(place: str, stage: str, kind: str) -> None:
    """The next call at that point fails; nothing does with an empty stage."""
    _armed[:] = [(place, stage, kind)] if stage else []


def fired() -> bool:
    """True if what was armed has happened."""
    return not _armed


def _wrapped(honest: Any, place: str, stage: str, wanted: str) -> Any:
    behind = wanted == "behind"  # it fails once it has done its work

    def act(args: tuple[Any, ...]) -> None:
        if _armed and _armed[0][:2] == (place, stage) and (behind or _has(args, wanted)):
            _fail(stage, place, _armed.pop()[2])

    if inspect.iscoroutinefunction(honest):

        @functools.wraps(honest)
        async def later(*args: Any, **kwargs: Any) -> Any:
            if not behind:
                act(args)
            result = await honest(*args, **kwargs)
            if behind:
                act(args)
            return result

        return later

    @functools.wraps(honest)
    def now(*args: Any, **kwargs: Any) -> Any:
        act((*args, *kwargs.values()))
        return honest(*args, **kwargs)

    return now


def _has(args: tuple[Any, ...], wanted: str) -> bool:
    return not wanted or any(wanted == arg or (isinstance(arg, list) and wanted in arg) for arg in args)


def _fail(stage: str, place: str, kind: str) -> None:
    where = f"injected: {kind} at {stage!r} in the {place}"
    if kind == "error":
        raise InjectedError(where)
    if kind == "oom":
        raise torch.OutOfMemoryError(where)
    if kind == "slow":
        time.sleep(SLOW_SECONDS)
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
        time.sleep(SIGNAL_SECONDS)


def arm_engine(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """A custom loader of SGLang: arms the last engine rank, or has all engine ranks forget every sync before."""
    from verl_sync_plugin.rollouts.sglang import loader

    install("engine")
    stage, kind = json.loads(named_tensors[0][0])
    if not stage:
        loader._sessions.clear()
    last = torch.distributed.get_world_size() - 1
    arm("engine", stage if loader.tensor_parallel_rank() == last else "", kind)
