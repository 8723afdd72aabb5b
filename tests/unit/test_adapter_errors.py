# SPDX-License-Identifier: Apache-2.0
"""Errors around the sync that one rank has alone: told to all, or not worth the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.workers.config import HFModelConfig

from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.hooks.driver import SyncRolloutConfig
from verl_sync_plugin.report import REPORT_FILE_VARIABLE, SyncReport, write_report
from verl_sync_plugin.rollouts import adapter as adapter_module
from verl_sync_plugin.rollouts.sglang.adapter import SyncServerAdapter
from verl_sync_plugin.trainers.shard_stream import ShardStream


class Manager:
    """As much of a sharding manager as the adapter uses; what ``attempt`` catches fails the sync."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.asked: list[list[str]] = []
        self.agreement = SimpleNamespace(attempt=self.attempt)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.errors.append(error)

    async def update_weights(self, tags: list[str], global_steps: int | None) -> None:
        self.asked.append(tags)
        errors, self.errors = self.errors, []
        if errors:
            raise SyncError(f"on all ranks: {errors[0]}")


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    """What our adapter makes on one rank; its device cannot be read."""
    made = Manager()
    for name, value in {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)

    def broken(device: torch.device) -> None:
        raise RuntimeError("CUDA error of the step before")

    monkeypatch.setattr(adapter_module, "read_device", broken)
    monkeypatch.setattr(SyncServerAdapter, "_make_manager", lambda *_: made)
    return made


def test_an_error_while_making_room_is_told_to_all_and_forgotten(
    manager: Manager, tiny_model: Callable[[str], str]
) -> None:
    """Where an asynchronous device error of the training step shows first."""
    config = SyncRolloutConfig(name="sglang", tensor_model_parallel_size=1, multi_stage_wake_up=True)
    mesh: Any = {"infer_tp": None}
    adapter = SyncServerAdapter(config, HFModelConfig(path=tiny_model("qwen2")), mesh)
    adapter.server_actor = None
    stream = ShardStream(None, list)
    asyncio.run(adapter.resume(["weights"]))
    adapter.make_room_for_weights(offloaded=False)
    with pytest.raises(SyncError, match="on all ranks: CUDA error of the step before"):
        asyncio.run(adapter.update_weights(stream, 1, ends=False))
    for step in (2, 3):
        asyncio.run(adapter.update_weights(stream, step, ends=False))
    assert manager.asked == [["weights"], ["weights"], []], "what could not be woken is still to be"


def test_a_report_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(REPORT_FILE_VARIABLE, str(tmp_path / "nowhere" / "file"))
    write_report(SyncReport())
    assert "is not written" in capsys.readouterr().out
    monkeypatch.setenv(REPORT_FILE_VARIABLE, str(tmp_path / "file"))
    write_report(SyncReport())
    assert '"event": "sync_report"' in (tmp_path / "file").read_text()
