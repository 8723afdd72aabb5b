# SPDX-License-Identifier: Apache-2.0
"""An engine for a script, in a process of its own, since an engine changes its process (signals, start method, event
loop, environment) and may end it; and the calls between the two. When the script ends, their socket closes, and the
engine ends. Of no engine."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from verl_sync_plugin.rollouts import LocalLaunch
from verl_sync_plugin.sync.endpoint import call_under_way

# torchrun's: with them the engine's ranks would look for torchrun's store, and number themselves like the trainer's
TORCHRUN = re.compile(r"(TORCHELASTIC|ROLE|GROUP)_.*|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)")
CLOSE_SECONDS = 60.0


class EngineProcess:
    """A process with an engine in it, started by this one. ``devices``: its GPUs' names in ``CUDA_VISIBLE_DEVICES``, in
    tensor-parallel order; none on a CPU. ``ready``: done when the engine answers, or could not be launched."""

    def __init__(self, launch: LocalLaunch, devices: Sequence[str]) -> None:
        given = {**launch.environment, **os.environ}
        if devices:
            given["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        environment = {name: value for name, value in given.items() if not TORCHRUN.fullmatch(name)}
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", launch.module, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        self._engine = launch.engine
        self._connection = Connection(ours.detach())
        self._turn = threading.Lock()
        self.ready: Future[None] = call_under_way()
        self._asked: dict[int, Future[Any]] = {0: self.ready}
        self._number = 0
        self._ended = ""
        self._connection.send(launch.arguments)
        threading.Thread(target=self._listen, name="verl-sync-engine", daemon=True).start()

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """Calls a method of the engine's server, in the order in which calls are made; returns at once. RuntimeError is
        the answer of an engine that has ended."""
        future = call_under_way()
        with self._turn:
            if self._ended:
                future.set_exception(RuntimeError(self._ended))
            else:
                self._number += 1
                self._asked[self._number] = future
                with suppress(OSError):  # the listener finds the end
                    self._connection.send((self._number, method, arguments))
        return future

    def _listen(self) -> None:
        while True:
            try:
                number, error, value = self._connection.recv()
            except (EOFError, OSError, pickle.UnpicklingError):
                break
            with self._turn:
                future = self._asked.pop(number)
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
        with self._turn:
            self._ended = f"{self._engine}'s process has ended; see its log above"
            left, self._asked = self._asked, {}
        for future in left.values():
            future.set_exception(RuntimeError(self._ended))

    def close(self) -> None:
        """Ends the engine and waits for it; harmless when it has ended."""
        with suppress(OSError):
            socket.socket(fileno=os.dup(self._connection.fileno())).shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(engine: str, make: Callable[..., Any]) -> None:
    """The engine's process: launches it, answers the calls that come through the socket ``sys.argv[1]``, ends it.
    ``make`` takes ``LocalLaunch.arguments`` and returns the server: an object with asynchronous methods, and
    ``engine``, which has the event ``loop`` that they run in, and ``shutdown``."""
    connection = Connection(int(sys.argv[1]))
    try:
        server = make(*connection.recv())
    except BaseException as error:
        traceback.print_exc()
        connection.send((0, RuntimeError(f"{engine} could not be launched: {error!r}"), None))
        return
    connection.send((0, None, None))
    try:
        server.engine.loop.run_until_complete(_serve(server, connection))
    finally:
        server.engine.shutdown()


async def _serve(server: Any, connection: Connection) -> None:
    """Answers calls until the script is gone; those under way do not wait for each other."""
    gone, loop = asyncio.Event(), asyncio.get_running_loop()

    def receive() -> None:
        with suppress(EOFError, OSError):
            while True:
                asyncio.run_coroutine_threadsafe(_answer(server, connection, *connection.recv()), loop)
        loop.call_soon_threadsafe(gone.set)

    threading.Thread(target=receive, daemon=True).start()
    await gone.wait()


async def _answer(server: Any, connection: Connection, number: int, method: str, arguments: Any) -> None:
    answer: tuple[int, Exception | None, Any]
    try:
        answer = number, None, await getattr(server, method)(*arguments)
    except Exception as error:  # as one of Python's own, which the script's process can unpickle
        kinds = (ValueError, TimeoutError, RuntimeError)
        kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
        answer = number, kind(str(error) or repr(error)), None
    connection.send(answer)
