# SPDX-License-Identifier: Apache-2.0
"""Keeps worlds of real processes with a gloo group between tests of one kind, so that imports are paid for once.

Every run has a limit, from when all ranks have imported what they run. Then it is killed; its stacks are in stderr.
"""

import atexit
import contextlib
import datetime
import faulthandler
import functools
import importlib
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

IMPORTED = "imported"  # what every rank says before it runs anything
IMPORT_SECONDS = 300.0

_pool: list[tuple[Any, Connection]] = []
_kinds = {"pool": "", "wanted": ""}


class WorldError(AssertionError):
    """A rank raised, died or did not answer in time; the text has its traceback."""


def _member(pipe: Connection) -> None:
    """A pool process: one process group per run, until the pipe closes."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while True:
        try:
            module, name, arguments, given, rank, size, store, seconds = pipe.recv()
        except EOFError:
            return
        function = getattr(importlib.import_module(module), name)
        function = getattr(function, "__wrapped__", function)
        pipe.send(IMPORTED)
        faulthandler.dump_traceback_later(0.9 * seconds)
        try:
            limit = datetime.timedelta(seconds=seconds)
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
            # A tensor's bytes: torch's own pickle would share its memory, and SGLang's imports have that go by a server
            pipe.send_bytes(pickle.dumps((True, function(*arguments, **given))))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
            if (sglang := sys.modules.get("sglang.srt.distributed.parallel_state")) is not None:
                sglang.destroy_model_parallel()  # its groups of ranks end with the world
                sglang.destroy_distributed_environment()
            if dist.is_initialized():
                dist.destroy_process_group()


@contextlib.contextmanager
def kind(name: str) -> Iterator[None]:
    """Worlds inside share processes with those of this kind alone."""
    before, _kinds["wanted"] = _kinds["wanted"], name
    try:
        yield
    finally:
        _kinds["wanted"] = before


def _grow(size: int) -> None:
    if _kinds["pool"] != _kinds["wanted"]:
        stop()
        _kinds["pool"] = _kinds["wanted"]
    context = mp.get_context("spawn")
    while len(_pool) < size:
        ours, theirs = context.Pipe()
        process = context.Process(target=_member, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        _pool.append((process, ours))


@atexit.register
def stop() -> None:
    """Ends all pool processes."""
    for process, pipe in _pool:
        pipe.close()
        process.kill()
        process.join()
    _pool.clear()


def run_world(
    size: int, function: Callable[..., Any], /, *arguments: object, timeout: float = 120.0, **given: object
) -> list[Any]:
    """Runs a top-level function on ``size`` ranks within ``timeout`` seconds; returns results, or raises an error."""
    _grow(size)
    answers: dict[int, tuple[bool, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="world-", ignore_cleanup_errors=True) as folder:
        members = {pipe: rank for rank, (_, pipe) in enumerate(_pool[:size])}
        named = function.__module__, function.__name__
        for pipe, rank in members.items():
            pipe.send((*named, arguments, given, rank, size, os.path.join(folder, "store"), timeout))
        for pipe in members:
            with contextlib.suppress(EOFError, ConnectionError):  # the wait for the results finds that it has died
                assert not pipe.poll(IMPORT_SECONDS) or pipe.recv() == IMPORTED
        deadline = time.monotonic() + timeout
        while members and (ready := wait(list(members), deadline - time.monotonic())):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = members.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    _pool[rank][0].join()
                    answers[rank] = False, "it died"
    answers.update(dict.fromkeys(members.values(), (False, f"no answer within {timeout:g} s")))
    if members or not all(process.is_alive() for process, _ in _pool):
        stop()
    failures = [f"--- rank {rank}:\n{text}" for rank, (succeeded, text) in sorted(answers.items()) if not succeeded]
    if failures:
        raise WorldError("\n".join(failures))
    return [answers[rank][1] for rank in range(size)]


def on_ranks(size: int | str, timeout: float = 120.0) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Runs a test's body on every rank; ``size`` is their number, or the argument that is it or has it as ``size``."""

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            found = given[size] if isinstance(size, str) else size
            run_world(getattr(found, "size", found), test, timeout=timeout, **given)

        return run

    return decorate
