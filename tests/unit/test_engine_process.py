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
from verl_sync_plugin.rollouts.process import EngineProcess
from verl_sync_plugin.sync.endpoint import RolloutEndpoint

ENGINE = """
import asyncio
from types import SimpleNamespace
from verl_sync_plugin.rollouts.process import serve

class Server:
    engine = SimpleNamespace(loop=asyncio.new_event_loop(), shutdown=lambda: None)

    async def resume_tags(self, tags):
        await asyncio.sleep(1.0 if tags == ["slow"] else 0)

serve("An engine", Server)
"""


def test_an_answer_that_comes_too_late_stops_no_later_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_engine.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))
    process = EngineProcess(LocalLaunch("An engine", "an_engine", (), {}, False), [])
    endpoint = RolloutEndpoint(SimpleNamespace(ENGINE="An engine"), process.ask, timeout_seconds=0.25)  # type: ignore[arg-type]
    try:
        process.ready.result(60)
        with pytest.raises(TimeoutError, match=r"An engine did not answer within 0\.25 s \(.*timeout_seconds\)"):
            asyncio.run(endpoint.resume(["slow"]))
        process.ask("resume_tags", ["slow"]).result(60)  # the late answer has come before this one
        asyncio.run(endpoint.resume([]))
    finally:
        process.close()
