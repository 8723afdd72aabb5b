# SPDX-License-Identifier: Apache-2.0
"""The script's end of an engine of its own: starts ``local_server.py`` and calls it."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

SERVER = "verl_sync_plugin.rollouts.sglang.local_server"
# torchrun's: with them the engine's ranks would look for torchrun's store, and number themselves like the trainer's
TORCHRUN = ("TORCHELASTIC_", "ROLE_", "GROUP_")
TORCHRUN_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CLOSE_SECONDS = 60.0
NEVER_SYNCED = "the engine has random weights: call sync_weights first"


class LocalEngine:
    """A process with SGLang in it, started by this one.

    Args:
        arguments: of SGLang.
        devices: what its GPUs are called in ``CUDA_VISIBLE_DEVICES``, in tensor-parallel order; none on a CPU.
        timeout_seconds: bound on its sleep and wake.
        unready: why nothing may be generated before the first sync; empty when it may.
        keeps_copy: weights that were released come back as they were.

    Attributes:
        ready: done when SGLang answers, with an error when it could not be launched.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        devices: Sequence[str],
        timeout_seconds: float,
        unready: str,
        keeps_copy: bool,
    ) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", SERVER, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, env=environment(devices, int(arguments["tp_size"])), pass_fds=[theirs.fileno()]
            )
        self._connection = Connection(ours.detach())
        self._turn = threading.Lock()
        self.ready: Future[None] = Future()
        self._asked: dict[int, Future[Any]] = {0: self.ready}
        self._number = 0
        self._ended = ""
        self._connection.send((dict(arguments), timeout_seconds, unready, keeps_copy))
        threading.Thread(target=self._listen, name="verl-sync-engine", daemon=True).start()

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """Calls a method of ``LocalServer``; returns at once. The engine has calls in the order in which they are made.

        Returns:
            Its answer, or its error; RuntimeError when SGLang has ended.
        """
        future: Future[Any] = Future()
        with self._turn:
            if self._ended:
                future.set_exception(RuntimeError(self._ended))
                return future
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
            self._ended = "SGLang's process has ended; see its log above"
            left, self._asked = self._asked, {}
        for future in left.values():
            future.set_exception(RuntimeError(self._ended))

    def close(self) -> None:
        """Ends SGLang and waits for it; harmless when it has ended."""
        with suppress(OSError):
            socket.socket(fileno=os.dup(self._connection.fileno())).shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def environment(devices: Sequence[str], tp_size: int) -> dict[str, str]:
    """This process's environment as SGLang's is to have it.

    Args:
        devices: see ``LocalEngine``.
        tp_size: tensor-parallel ranks.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN_NAMES and not name.startswith(TORCHRUN)
    }
    if devices:
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        kept.setdefault("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")  # verl runs with older ones too
    else:  # SGLang wants to know which cores each of its ranks has
        kept.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(rank) for rank in range(tp_size)))
    return kept
