"""What a scheduler rank keeps mapped of the trainer's parameters, and how long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from verl_sync_plugin.receiver.session import ReceiverSession
from verl_sync_plugin.transport.channel import ChannelClosedError
from verl_sync_plugin.transport.memory.exports import Live, Region
from verl_sync_plugin.transport.protocol import (
    TOGETHER_SLACK_SECONDS,
    TOGETHER_WAITS,
    Coverage,
    Hello,
    LoadRequest,
    Ready,
    Whereabouts,
)


class Trainer:
    """The other end of a channel: says what it is given, hears the rest, and then is gone."""

    def __init__(self, *words: object) -> None:
        self._words, self.heard = list(words), list[object]()
        self.waits: list[float] = []

    def send(self, word: object) -> None:
        self.heard.append(word)

    def receive(self, timeout: float) -> object:
        self.waits.append(timeout)
        if not self._words:
            raise ChannelClosedError("gone")
        return self._words.pop(0)


class Engine:
    """As much of an unpacker as a session asks before anything is loaded."""

    device, reads_in_place = torch.device("cpu"), ""
    forgot = False

    def begin(self, *given: object) -> None: ...

    def forget_places(self) -> None:
        self.forgot = True


def live_of(key: str, *paths: Path) -> Live:
    return Live(key, tuple(Region("shared_file", str(path), 64, (str(path),)) for path in paths), ())


@pytest.fixture
def session(tmp_path: Path) -> Any:
    """One that knows the plan and has mapped a file."""
    (tmp_path / "there").write_bytes(bytes(64))
    made: Any = ReceiverSession(None)
    made._digest, made._unpacker, made._coverage = "plan", Engine(), {"plan": Coverage(1, ())}
    assert met(made, live_of("first", tmp_path / "there")) == [Ready(needs_live=True), Ready()]
    assert len(made._regions._mapped) == 1
    return made


def met(session: Any, live: Live) -> list[object]:
    trainer = Trainer(Whereabouts((live,)))
    session._meet_in_place(Hello("1", "plan", (), live=(live.key,)), trainer, 1.0)
    return trainer.heard


def test_nothing_stays_mapped_when_something_cannot_be(session: Any, tmp_path: Path) -> None:
    *_, answer = met(session, live_of("second", tmp_path / "there", tmp_path / "gone"))
    assert "FileNotFoundError" in answer.unreachable
    assert not session._regions._mapped


def test_a_staged_sync_lets_go_of_parameters(session: Any) -> None:
    with pytest.raises(AttributeError):  # of an export that is none: the sync goes no further
        session._run_staged(Hello("2", "plan", (None,)), Trainer(), 1.0)  # type: ignore[arg-type]
    assert not session._regions._mapped and session._lives == ()
    assert session._unpacker.forgot, "tables with addresses that are no longer mapped"


def test_the_first_word_may_take_as_long_as_trainer_ranks_wait_for_each_other() -> None:
    """An engine that is awake comes while they gather and plan."""
    trainer: Any = Trainer()
    with pytest.raises(ChannelClosedError):
        ReceiverSession(None).run(trainer, LoadRequest("1", (), 5.0))
    assert trainer.waits == [TOGETHER_WAITS * 5.0 + TOGETHER_SLACK_SECONDS]
