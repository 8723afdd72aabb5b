# SPDX-License-Identifier: Apache-2.0
"""The engine that a rank owns, if it does, and how all ranks wait for theirs together."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

from verl_sync_plugin.errors import RankLostError, RolloutError, SyncError
from verl_sync_plugin.rollouts.base import LocalEngineProcess, LocalLaunch
from verl_sync_plugin.spmd.groups import EngineGroup
from verl_sync_plugin.transport.agreement import Agreement

ROUND_SECONDS = 1.0


class OwnEngine:
    """Launches one on the ranks that own one. Collective, as ``call`` is.

    Args:
        agreement: of all ranks.
        group: of the ranks beside this rank's engine.
        launch: of the engine.

    Raises:
        SyncError: an engine could not be launched; the same text on every rank.

    Attributes:
        process: ``None`` on a rank that owns none.
    """

    def __init__(self, agreement: Agreement, group: EngineGroup, launch: LocalLaunch) -> None:
        self.process: LocalEngineProcess | None = None
        self._agreement = agreement

        def start() -> None:
            if group.leads:
                self.process = launch.start(group.devices)

        try:
            agreement.step("starting the engine", start)
            self._awaited("launching the engine", None if self.process is None else self.process.ready)
        except BaseException:
            self.close()
            raise

    def call(self, what: str, method: str, *arguments: Any) -> Any:
        """Calls a method of the engine's server, on all engines.

        Args:
            what: the step, for messages.
            method: see ``LocalEngineProcess.ask``.
            arguments: of the method.

        Returns:
            The answer of this rank's engine, once every engine has answered; ``None`` where it owns none.

        Raises:
            SyncError: any engine failed, which ends the wait of all; the same text on every rank.
        """
        future = None if self.process is None else self.process.ask(method, *arguments)
        return self._awaited(what, future)

    def _awaited(self, what: str, future: Future[Any] | None) -> Any:
        """Waits in rounds: an engine may take any time, and a rank that has failed is heard at once."""
        answer = None
        while True:
            with self._agreement.attempt():
                if future is not None and wait([future], ROUND_SECONDS).done:
                    answer, future = future.result(), None
            if not self._agreement.settle(what, waiting=future is not None):
                return answer

    def abort(self) -> None:
        """Ends the requests of this rank's engine; not collective."""
        if self.process is not None:
            self.process.ask("abort")

    def close(self) -> None:
        """Ends the engine; not collective."""
        if self.process is not None:
            self.process.close()


@contextmanager
def errors(what: str) -> Iterator[None]:
    """What fails inside is no failed sync, but a ``RolloutError``.

    Args:
        what: what is done inside, for the message.
    """
    try:
        yield
    except RankLostError:
        raise
    except SyncError as error:
        raise RolloutError(f"{what} failed.\n{str(error).partition(chr(10))[2] or error}") from error
