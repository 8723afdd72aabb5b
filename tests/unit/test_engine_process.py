# SPDX-License-Identifier: Apache-2.0
"""Calls of a script to its engine's process: one that is given up leaves the others their answers."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_sync_plugin.rollouts import LocalLaunch
from verl_sync_plugin.rollouts.process import EngineProcess, serve
from verl_sync_plugin.sync.endpoint import RolloutEndpoint

SLOW_SECONDS = 1.0


class Server:
    def __init__(self) -> None:
        self.engine = SimpleNamespace(loop=asyncio.new_event_loop(), shutdown=lambda: None)

    async def resume_tags(self, tags: list[str]) -> None:
        await asyncio.sleep(SLOW_SECONDS if tags == ["slow"] else 0)


def test_an_answer_that_comes_too_late_stops_no_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    process = EngineProcess(LocalLaunch("An engine", __name__, (), {}, False), [])
    endpoint = RolloutEndpoint(SimpleNamespace(ENGINE="An engine"), process.ask, timeout_seconds=SLOW_SECONDS / 4)  # type: ignore[arg-type]
    try:
        process.ready.result(60)
        with pytest.raises(TimeoutError, match=r"An engine did not answer within 0\.25 s \(.*timeout_seconds\)"):
            asyncio.run(endpoint.resume(["slow"]))
        process.ask("resume_tags", ["slow"]).result(60)  # the late answer has come before this one
        asyncio.run(endpoint.resume([]))
    finally:
        process.close()


if __name__ == "__main__":
    serve("An engine", Server)
