# SPDX-License-Identifier: Apache-2.0
"""What a scheduler rank keeps mapped of the trainer's parameters, and how long."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_sync_plugin.engine import session as receiver_session
from verl_sync_plugin.engine.session import ReceiverSession
from verl_sync_plugin.layout.load_map import LoadMap
from verl_sync_plugin.transport.channel import ChannelClosedError
from verl_sync_plugin.transport.memory.host import Live, Region
from verl_sync_plugin.transport.memory.regions import Regions
from verl_sync_plugin.transport.protocol import (
    TOGETHER_SLACK_SECONDS,
    TOGETHER_WAITS,
    Commit,
    Committed,
    Details,
    Hello,
    LoadRequest,
    Manifest,
    Ready,
)

REQUEST = LoadRequest("1", (), 1.0)


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


class Model(torch.nn.Linear):
    """Stands for the engine's; nothing is loaded into it."""

    @property
    def module(self) -> torch.nn.Module:
        return self

    def layout_token(self) -> tuple[object, ...]:
        return ()


class Engine:
    """As much of a load as a session asks when nothing is loaded."""

    device, obstacle, replayed, layout, map = torch.device("cpu"), "", (0, 0), (), LoadMap()
    forgot = False

    def look(self) -> None: ...

    def begin(self) -> None: ...

    def finish(self) -> None: ...

    def traffic(self, near: frozenset[int], beside: bool) -> tuple[int, int]:
        return 0, 0

    def sums(self) -> bytes:
        return b""

    def forget_lives(self) -> None:
        self.forgot = True


@dataclass
class Rank:
    """A scheduler rank: its session, and what that works with."""

    session: ReceiverSession
    engine: Engine
    regions: Regions

    def met(self, live: Live) -> list[object]:
        """What the session says of parameters that lie there; the trainer is gone before the load."""
        trainer: Any = Trainer(Hello("1", "plan", (), live=(live.key,)), Details(lives=(live,)))
        with suppress(ChannelClosedError):
            self.session.run(trainer, REQUEST)
        return trainer.heard


def live_of(key: str, *paths: Path) -> Live:
    return Live(key, tuple(Region("shared_file", str(path), 64, (str(path),)) for path in paths), ())


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """One that knows the plan and has mapped a file."""
    engine, regions, model = Engine(), Regions(), Model(1, 1)
    monkeypatch.setattr(receiver_session, "ModelLoad", lambda *_: engine)
    monkeypatch.setattr(receiver_session.ReceiverSession, "_refuse_rearranged", lambda *_: None)
    monkeypatch.setattr(receiver_session, "Regions", lambda: regions)
    monkeypatch.setattr(receiver_session, "open_staging", lambda _: torch.zeros(64, dtype=torch.uint8))
    made = Rank(ReceiverSession(model), engine, regions)  # type: ignore[arg-type, unused-ignore]
    staging: Any = SimpleNamespace(key="staging", slot_bytes=64)
    words: Any = Trainer(Hello("0", "plan", (staging,)), Details(Manifest((), (), ())), Commit())
    made.session.run(words, REQUEST)
    assert isinstance(words.heard[-1], Committed)
    (tmp_path / "there").write_bytes(bytes(64))
    assert made.met(live_of("first", tmp_path / "there")) == [Ready(needs_live=True), Ready()]
    assert len(regions.mapped) == 1
    return made


def test_nothing_stays_mapped_when_something_cannot_be(rank: Rank, tmp_path: Path) -> None:
    answer: Any = rank.met(live_of("second", tmp_path / "there", tmp_path / "gone"))[-1]
    assert "FileNotFoundError" in answer.unreachable
    assert not rank.regions.mapped


def test_a_staged_sync_lets_go_of_parameters(rank: Rank, tmp_path: Path) -> None:
    broken: Any = Trainer(Hello("2", "plan", (None,)))  # type: ignore[arg-type]
    with pytest.raises(AttributeError):  # of an export that is none: the sync goes no further
        rank.session.run(broken, REQUEST)
    assert not rank.regions.mapped
    assert rank.engine.forgot, "tables with addresses that are no longer mapped"
    assert rank.met(live_of("first", tmp_path / "there"))[0] == Ready(needs_live=True)


def test_the_first_word_may_take_as_long_as_trainer_ranks_wait_for_each_other() -> None:
    """An engine that is awake comes while they gather and plan."""
    trainer: Any = Trainer()
    with pytest.raises(ChannelClosedError):
        ReceiverSession(Model(1, 1)).run(trainer, LoadRequest("1", (), 5.0))
    assert trainer.waits == [TOGETHER_WAITS * 5.0 + TOGETHER_SLACK_SECONDS]
