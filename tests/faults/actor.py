# SPDX-License-Identifier: Apache-2.0
"""The handle of a server actor over a pipe, in place of Ray's: calls start in their order, and run side by side."""

import asyncio
import itertools
import threading
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorDiedError


async def worker_calls(adapter: Any, stream: Any, version: int) -> None:
    """Calls the rollout adapter for a sync as verl's worker does, and ours."""
    adapter.make_room_for_weights(False)
    await adapter.resume(["weights"])
    await adapter.update_weights(stream, global_steps=version, ends=False)
    await adapter.make_room_for_rest(lambda: None)
    await adapter.end_sync()


class Reference:
    """Stands for ``ray.ObjectRef``."""

    def __init__(self) -> None:
        self.answer: Future[Any] = Future()

    def future(self) -> Future[Any]:
        """A new one for each waiter, as Ray's is: a waiter that gives up cancels its own only."""
        mine: Future[Any] = Future()

        def hand_on(answer: Future[Any]) -> None:
            if mine.set_running_or_notify_cancel():
                error = answer.exception()
                mine.set_exception(error) if error is not None else mine.set_result(answer.result())

        self.answer.add_done_callback(hand_on)
        return mine


class Handle:
    """``handle.method.remote(*args)`` gives a ``Reference``; a dead server raises Ray's own error."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._numbers = itertools.count()
        self._waiting: dict[int, Reference] = {}
        self._lock = threading.Lock()
        self._dead = False
        threading.Thread(target=self._hear, daemon=True).start()

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._ask, method))

    def _ask(self, method: str, *args: Any) -> Reference:
        reference = Reference()
        with self._lock:
            number = next(self._numbers)
            try:
                if self._dead:
                    raise EOFError
                self._pipe.send((number, method, args))
                self._waiting[number] = reference
            except (EOFError, OSError):
                reference.answer.set_exception(ActorDiedError())
        return reference

    def _hear(self) -> None:
        try:
            while True:
                number, error, value = self._pipe.recv()
                with self._lock:
                    reference = self._waiting.pop(number)
                reference.answer.set_exception(error) if error is not None else reference.answer.set_result(value)
        except (EOFError, OSError):
            with self._lock:
                self._dead, left = True, list(self._waiting.values())
            for reference in left:
                reference.answer.set_exception(ActorDiedError())


def serve(actor: Any, pipe: Connection, loop: asyncio.AbstractEventLoop) -> None:
    """Runs the calls of a ``Handle`` in the actor's loop, until nobody is there to make any."""
    lock = threading.Lock()

    def tell(number: int, done: Future[Any]) -> None:
        error = done.exception()
        with lock:
            pipe.send((number, error, None if error is not None else done.result()))

    def hear() -> None:
        while True:
            try:
                number, method, args = pipe.recv()
            except (EOFError, OSError):
                return
            call = asyncio.run_coroutine_threadsafe(getattr(actor, method)(*args), loop)
            call.add_done_callback(partial(tell, number))

    threading.Thread(target=hear, daemon=True).start()
