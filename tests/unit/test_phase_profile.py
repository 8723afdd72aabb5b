# SPDX-License-Identifier: Apache-2.0
"""The trace of one sync inside a training, with an engine that only answers."""

from __future__ import annotations

import asyncio
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.phase import tracing


class Engine:
    """Answers like SGLang's server and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.status = 200
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.asked.append((self.path, body))
                self.send_response(engine.status)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.http = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def rollout(self) -> Engine:
        return self

    server_actor = get_server_address = rollout

    async def _init_server_adapter(self) -> None:
        pass

    async def remote(self) -> tuple[str, int]:
        return ("127.0.0.1", self.http.server_address[1])


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.http.shutdown()
    engine.http.server_close()


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stale = tmp_path / "traces" / "sync1-trainer.trace.json.gz"
    stale.parent.mkdir()
    stale.touch()  # of an earlier run, whose engine's trace must not stand beside a newer one of the trainer
    for name, value in tracing.environment(stale.parent, steps=0).items():
        monkeypatch.setenv(name, value)
    assert not stale.exists()
    monkeypatch.setattr(tracing, "_syncs", 0)
    return tmp_path / "traces"


async def syncs(owner: Any, count: int) -> int:
    done = 0
    for _ in range(count):
        async with tracing.around(owner, "sync"), tracing.around(owner, "update_weights"):
            torch.ones(8).clone()
            done += 1
    return done


def test_the_syncs_after_the_measured_ones_are_traced(engine: Engine, traces: Path, tmp_path: Path) -> None:
    assert asyncio.run(syncs(engine, 4)) == 4
    assert [path for path, _ in engine.asked] == ["/start_profile", "/stop_profile"] * 2
    assert [body.get("profile_prefix") for _, body in engine.asked[::2]] == ["sync1-engine", "sync2-engine"]
    assert {path.name for path in traces.iterdir()} == {f"sync{n}-trainer.trace.json.gz" for n in (1, 2)}
    with pytest.raises(ValueError, match="no traces"):
        tracing.collect(traces, tmp_path / "out", "case")
    shutil.copyfile(traces / "sync1-trainer.trace.json.gz", traces / "sync2-engine-17.3-TP-0.trace.json.gz")
    found = tracing.collect(traces, tmp_path / "out", "case")
    assert [stage["name"] for stage in found["stages"]] == ["call of update_weights", "outside of these"]
    assert any(row["name"] == "aten::clone" for row in found["processes"]["trainer"]["host"])
    assert found["processes"]["engine 0"]["host"] == [], "another sync's, so outside of the window"


def test_engine_that_refuses_does_not_end_the_training(
    engine: Engine, traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.status = 500
    assert asyncio.run(syncs(engine, 4)) == 4
    assert list(traces.iterdir()) == []
    assert "no trace of sync 1" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "value"), [("RANK", "1"), (tracing.FOLDER, "")])
def test_other_ranks_and_other_runs_trace_nothing(
    engine: Engine, traces: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert asyncio.run(syncs(engine, 4)) == 4
    assert engine.asked == []
