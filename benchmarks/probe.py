# SPDX-License-Identifier: Apache-2.0
"""Times the weight sync from inside every verl process, for stock verl and the plugin alike, editing no file.

``VERL_USE_EXTERNAL_MODULES=benchmarks.probe SYNC_PROBE_FILE=/some/file`` loads it. Post-import hooks wrap
the methods of ``TARGETS``; each call appends one JSON line. A subclass's override, such as the plugin's, is wrapped as
well as what it overrides, and of nested calls only the outermost of a group writes a line, so nothing is counted twice.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

from benchmarks import gauges

AsyncMethod = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Target:
    """A class of verl whose methods are timed, in it and in its subclasses.

    Attributes:
        module: where the class is defined.
        cls: the class.
        events: the event's name in the probe file, by method.
        process: what kind of process it lives in.
        group: of nested calls in one group the outermost alone is measured.
    """

    module: str
    cls: str
    events: Mapping[str, str]
    process: str
    group: str


_SGLANG = "verl.workers.rollout.sglang_rollout"
_ADAPTER_EVENTS = {"resume": "resume", "update_weights": "update_weights"}
_SERVER_EVENTS = {"sleep": "sleep", "abort_all_requests": "stop", "resume_generation": "go_on"}
TARGETS = (
    Target("verl.workers.engine_workers", "ActorRolloutRefWorker", {"update_weights": "sync"}, "trainer", "sync"),
    Target(f"{_SGLANG}.sglang_rollout", "ServerAdapter", _ADAPTER_EVENTS, "trainer", "stage"),
    Target(f"{_SGLANG}.async_sglang_server", "SGLangHttpServer", _SERVER_EVENTS, "server", "stage"),
    # the driver's whole sync, of separate rollouts as of colocated ones
    Target("verl.checkpoint_engine.base", "CheckpointEngineManager", {"update_weights": "whole"}, "driver", "whole"),
)

_open_groups: ContextVar[frozenset[str]] = ContextVar("sync_probe_open_groups", default=frozenset())
_counted = False


def write(record: dict[str, Any]) -> None:
    """Appends one line to ``$SYNC_PROBE_FILE``, in a single write: many processes share the file."""
    path = os.environ.get("SYNC_PROBE_FILE")
    if not path:
        return
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, (json.dumps(record) + "\n").encode())
    finally:
        os.close(handle)


class _Counter:
    """Counts the bytes of the tensors that a weight generator yields."""

    bytes = 0

    def wrap(self, weights: Iterable[Any]) -> Iterator[Any]:
        for name, tensor in weights:
            self.bytes += int(tensor.nbytes)
            yield name, tensor


def _count_first_stock_sync(owner: Any, event: str, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], _Counter]:
    """Counts what stock verl sends, in the first sync only: the warm-up, so that no measured sync pays for it."""
    global _counted
    counter = _Counter()
    stock = event == "update_weights" and type(owner).__name__ == "ServerAdapter"
    if not stock or _counted or not args or not inspect.isgenerator(args[0]):
        return args, counter
    _counted = True
    return (counter.wrap(args[0]), *args[1:]), counter


def _record(owner: Any, process: str, event: str, tags: Any, counter: _Counter) -> dict[str, Any]:
    record: dict[str, Any] = {
        "process": process,
        "pid": os.getpid(),
        "rank": int(getattr(owner, "replica_rank", 0) if process == "server" else os.environ.get("RANK", "0")),
        "event": event,
        "class": type(owner).__name__,
        "tags": list(tags) if tags else [],
    }
    return {**record, "nbytes": counter.bytes} if counter.bytes else record


async def _measure(
    process: str, event: str, method: AsyncMethod, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    tags = kwargs.get("tags", args[0] if event == "resume" and args else None)
    args, counter = _count_first_stock_sync(owner, event, args)
    # one thread for the whole call: a second one for the stage within would only cost time
    sampler = gauges.PeakSampler(threaded=event == "sync")
    if event == "sync":
        gauges.reset_rss_peak()
    gauges.synchronize()
    sampler.start()
    start, clock, ok = time.time(), time.perf_counter(), False
    try:
        result = await method(owner, *args, **kwargs)
        gauges.synchronize()
        ok = True
        return result
    finally:
        seconds = time.perf_counter() - clock
        sampler.stop()
        record = _record(owner, process, event, tags, counter)
        record |= {"ok": ok, "start": start, "seconds": seconds, "t": time.time()}
        record |= {"device_used_bytes": gauges.device_used_bytes(gauges.current_device())}
        if event == "sync":
            record |= {"host_used_bytes": gauges.host_used_bytes()}
        record |= {"peak_device_bytes": sampler.device_peak, "rss_peak_bytes": gauges.rss_peak_bytes()}
        write(record)


def timed_plain(target: Target, event: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of the driver that is no coroutine function; its process has no device to look at."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        open_groups = _open_groups.get()
        if target.group in open_groups:
            return method(self, *args, **kwargs)
        token = _open_groups.set(open_groups | {target.group})
        start, clock = time.time(), time.perf_counter()
        try:
            result = method(self, *args, **kwargs)
        finally:
            _open_groups.reset(token)
        if inspect.isawaitable(result):
            raise TypeError(f"{method.__qualname__} was called in a running event loop; the probe cannot time that")
        record = _record(self, target.process, event, None, _Counter())
        record |= {"ok": True, "start": start, "seconds": time.perf_counter() - clock, "t": time.time()}
        write(record | {"backend": str(getattr(self, "backend", ""))})
        return result

    wrapper.sync_probe = True  # type: ignore[attr-defined]
    return wrapper


def timed(target: Target, event: str, method: AsyncMethod) -> AsyncMethod:
    """Wraps ``method``; its attributes, where verl keeps its dispatch mode, go with it."""

    @functools.wraps(method)
    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        open_groups = _open_groups.get()
        if target.group in open_groups:
            return await method(self, *args, **kwargs)
        token = _open_groups.set(open_groups | {target.group})
        try:
            return await _measure(target.process, event, method, self, args, kwargs)
        finally:
            _open_groups.reset(token)

    wrapper.sync_probe = True  # type: ignore[attr-defined]
    return wrapper


def _wrap_own(cls: type, target: Target) -> None:
    """Wraps the methods that ``cls`` defines or takes from a mixin; others are wrapped where they are defined."""
    for name, event in target.events.items():
        method = inspect.getattr_static(cls, name, None)
        if method is None or getattr(method, "sync_probe", False):
            continue
        if inspect.iscoroutinefunction(method) == (target.process == "driver"):
            raise TypeError(f"{cls.__name__}.{name} is no longer what the probe knows how to time")
        wrapper = (timed_plain if target.process == "driver" else timed)(target, event, method)
        # Hazard: by the mixin's name, pickle would find what is wrapped, and then fail to pickle the wrapper by value
        wrapper.__module__, wrapper.__qualname__ = cls.__module__, f"{cls.__qualname__}.{name}"
        setattr(cls, name, wrapper)


def watch(cls: type, target: Target) -> None:
    """Wraps the methods of ``cls`` and of every subclass, as soon as that is defined.

    Subclasses are not found by the import of their module: where that module is what imports verl, it is half
    imported when the probe loads, and no hook would run at its end.
    """
    _wrap_own(cls, target)

    def init_subclass(subclass: type, **kwargs: Any) -> None:
        super(cls, subclass).__init_subclass__(**kwargs)  # type: ignore[arg-type]
        _wrap_own(subclass, target)

    cls.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment, arg-type]


def _install(target: Target) -> None:
    def patch(module: ModuleType) -> None:
        watch(getattr(module, target.cls), target)

    wrapt.register_post_import_hook(patch, target.module)


def install() -> None:
    """Registers the hooks of all targets; without ``$SYNC_PROBE_FILE`` nothing is wrapped."""
    if os.environ.get("SYNC_PROBE_FILE"):
        for target in TARGETS:
            _install(target)


install()
