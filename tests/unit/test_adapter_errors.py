"""Errors around the sync that one rank has alone: told to all, or not worth the run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.report.file import REPORT_FILE_VARIABLE, write_report
from verl_sync_plugin.report.sync_report import SyncReport
from verl_sync_plugin.rollouts.sglang.adapter import SyncServerAdapter
from verl_sync_plugin.trainers.shard_stream import ShardStream


class Manager:
    """As much of a sharding manager as the adapter uses; what ``attempt`` catches fails the sync."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.abandoned: list[str] = []
        self.agreement = SimpleNamespace(attempt=self.attempt)
        self.endpoint = SimpleNamespace(leader=True, abandon=self.abandon)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.errors.append(error)

    async def abandon(self, why: str) -> None:
        self.abandoned.append(why)

    async def update_weights(self, tags: list[str], global_steps: int | None) -> None:
        errors, self.errors = self.errors, []
        if errors:
            raise SyncError(f"on all ranks: {errors[0]}")


def adapter_with(manager: Manager) -> Any:
    adapter = object.__new__(SyncServerAdapter)
    adapter._colocated, adapter._wake_tags, adapter._early = True, ["weights"], None
    adapter._manager, adapter.server_actor = manager, None  # type: ignore[assignment]
    adapter.config = SimpleNamespace(free_cache_engine=True)
    return adapter


def test_an_error_while_making_room_is_told_to_all_and_forgotten() -> None:
    """Where an asynchronous device error of the training step shows first."""
    manager = Manager()
    adapter = adapter_with(manager)
    stream = object.__new__(ShardStream)

    def broken(*_: Any) -> bool:
        raise RuntimeError("CUDA error of the step before")

    adapter._room = SimpleNamespace(make=broken)
    adapter.make_room_for_weights(offloaded=False)
    with pytest.raises(SyncError, match="on all ranks: CUDA error of the step before"):
        asyncio.run(adapter.update_weights(stream, 1))
    assert manager.abandoned == ["on all ranks: CUDA error of the step before"], "the engine may not generate"
    asyncio.run(adapter.update_weights(stream, 2))
    assert adapter._wake_tags == []


def test_a_report_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(REPORT_FILE_VARIABLE, str(tmp_path / "nowhere" / "file"))
    write_report(SyncReport())
    assert "is not written" in capsys.readouterr().out
    monkeypatch.setenv(REPORT_FILE_VARIABLE, str(tmp_path / "file"))
    write_report(SyncReport())
    assert '"event": "sync_report"' in (tmp_path / "file").read_text()
