# SPDX-License-Identifier: Apache-2.0
"""Makes the calls of verl's driver to the processes of a separate run by pipes, so that members can come and go."""

import importlib
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch.multiprocessing as mp

from ports import free_port

SECONDS = 240.0  # bound on every answer


@dataclass(frozen=True)
class Failure:
    kind: str
    text: str


class Member:
    """Holds a process and its pipe. Its kind is a name: SGLang, once imported, changes what transformers builds."""

    def __init__(self, kind: str, *args: Any) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(kind, theirs, args), daemon=False)
        self.process.start()
        theirs.close()

    def ask(self, method: str, *args: Any) -> Self:
        """Calls a method, or one of what the process holds; a path leads there."""
        self._pipe.send((method, args))
        return self

    def answer(self, seconds: float = SECONDS) -> Any:
        """Returns what the call returned, a ``Failure``, or ``None`` when the process is dead."""
        try:
            if not self._pipe.poll(seconds):
                raise TimeoutError("no answer")
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return None


def _serve(kind: str, pipe: Connection, args: tuple[Any, ...]) -> None:
    module, _, name = kind.rpartition(".")
    host = getattr(importlib.import_module(module), name)(*args)
    pipe.send("ready")
    while True:
        method, given = pipe.recv()
        try:
            pipe.send(reduce(getattr, method.split("."), host)(*given))
        except Exception as error:
            traceback.print_exc()
            pipe.send(Failure(type(error).__name__, str(error)))
        if method == "end":
            return


def together(members: Sequence[Member], method: str, *args: Any, seconds: float = SECONDS) -> list[Any]:
    """The same call to all, at the same time; their answers in order."""
    for member in members:
        member.ask(method, *args)
    return [member.answer(seconds) for member in members]


def end(members: Sequence[Member]) -> None:
    """Ends all at the same time, dead ones included."""
    for member in members:
        with suppress(OSError):
            member.ask("end")
    for member in members:
        member.process.join(20)
        member.process.kill()


class Driver:
    """Does what verl's ``CheckpointEngineManager`` does around a sync."""

    def __init__(self, trainers: list[Member]) -> None:
        self.trainers = trainers

    def sync(self, version: int, rollouts: list[Member]) -> list[Any]:
        """Answers of the trainer ranks, then of the rollout ranks."""
        from verl.checkpoint_engine import CheckpointEngineRegistry

        everyone = [*self.trainers, *rollouts]
        said = together(everyone, "prepare")
        parts = CheckpointEngineRegistry.get("sync_plugin").build_topology(len(self.trainers), len(rollouts), said)
        places = [place for part in parts for place in zip(part["rank"], part["members"], strict=True)]
        for member, place in zip(everyone, places, strict=True):
            member.ask("join", *place)
        assert [member.answer() for member in everyone] == [None] * len(everyone)
        return together(everyone, "sync", version)


@contextmanager
def members(
    model: str, rollouts: int, trainer: str = "processes.Trainer", rollout: str = "rollouts.Rollout", tp: int = 1
) -> Iterator[tuple[Driver, list[Member]]]:
    """Two trainer ranks and all ranks of rollouts; kinds by their names."""
    port = free_port()
    trainers = [Member(f"separate.{trainer}", rank, 2, port, model) for rank in range(2)]
    ports = [free_port() for _ in range(rollouts)]
    engines = [Member(f"separate.{rollout}", port, model, rank, tp) for port in ports for rank in range(tp)]
    try:
        assert [member.answer() for member in (*trainers, *engines)] == ["ready"] * (2 + rollouts * tp)
        yield Driver(trainers), engines
    finally:
        end([*engines, *trainers])


def exact(driver: Driver, rollouts: list[Member], folder: Path) -> None:
    """Every engine holds what SGLang loads from a checkpoint of the trainer."""
    folder.mkdir()
    together(driver.trainers, "save", folder / "checkpoint")
    for number, rollout in enumerate(rollouts):
        own = folder / str(number)
        own.mkdir()
        assert rollout.ask("sglang.differs", folder / "checkpoint", own).answer() == []


def failed_alike(answers: list[Any], text: str) -> None:
    """Every rank has failed with one text, which has this in it."""
    texts = {each.text for each in answers if isinstance(each, Failure)}
    assert len(texts) == 1 and all(isinstance(each, Failure) for each in answers), answers
    assert text in texts.pop(), answers


def none_failed(answers: list[Any]) -> list[Any]:
    assert not any(isinstance(each, Failure) for each in answers), answers
    return answers
