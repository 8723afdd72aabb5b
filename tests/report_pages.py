# SPDX-License-Identifier: Apache-2.0
"""Report files, and the pages that ``verl-sync report`` makes of them."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from verl_sync_plugin.cli import main
from verl_sync_plugin.report import SyncReport

GIB = 2**30


def line(step: int, rank: int = 0, pid: int = 7, **changes: Any) -> dict[str, Any]:
    """A report of this version: of a sync that read in place, 10 s after the one before."""
    start = 1000.0 + 10 * step
    report = SyncReport(
        step,
        "FSDP2SGLangShardingManager",
        stages={
            "sleep": 0.125, "update_weights": 0.25 + step / 16 + rank / 64, "resume_kv": 0.03125, "engine_load": 0.125,
        },
        nbytes=16_000_000_000,
        tensors=339,
        coverage_expected=199,
        own_bytes=6_000_000_000,
        peer_bytes=2_000_000_000,
        direct_bytes=8_000_000_000,
        delivery="direct",
        hashed_tensors=339,
        verified_tensors=337,
        not_comparable=2,
        staging_bytes=GIB,
        device_total_bytes=140 * GIB,
        device_used_bytes={
            "asleep": 50 * GIB, "weights": 58 * GIB, "synced": 58 * GIB, "room": 55 * GIB, "awake": 95 * GIB,
        },
        trainer_reserved_bytes={
            "asleep": 40 * GIB, "weights": 41 * GIB, "synced": 41 * GIB, "room": 38 * GIB, "awake": 38 * GIB,
        },
        origin={"host": f"node{rank // 8}", "pid": pid, "rank": rank, "device": "NVIDIA H200", "epoch": 1.79e9},
        spans=[
            ("connect", start + 0.0625, 0.0625),
            ("engine_load", start + 0.125, 0.125),
            ("update_weights", start, 0.25 + step / 16),
            ("resume_kv", start + 1.5, 0.03125),
        ],
    )  # fmt: skip
    return {"event": "sync_report", **report.as_dict(), **changes}


class Page(HTMLParser):
    """The cells of a page's tables by the table's id, and its text without markup."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.cells: dict[str, list[list[str]]] = {}
        self.text = ""
        self._table = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self._table = dict(attrs).get("id") or ""
        elif tag == "tr":
            self.cells.setdefault(self._table, []).append([])
        elif tag in ("td", "th"):
            self.cells[self._table][-1].append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.lasttag in ("td", "th"):
            self.cells[self._table][-1][-1] += data

    def row(self, table: str, heading: str) -> list[str]:
        (found,) = [cells for cells in self.cells[table] if cells[0] == heading]
        return found[1:]


def written(folder: Path, *lines: Any, name: str = "reports.jsonl") -> Path:
    file = folder / name
    file.write_text("".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in lines))
    return file


def page_of(file: Path, *options: str) -> tuple[str, Page]:
    assert main(["report", str(file), *options]) == 0
    folder = file if file.is_dir() else file.parent
    text = (folder / "sync-report.html").read_text(encoding="utf-8")
    return text, Page(text)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which the command ends."""
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    assert ended.value.code == 2
    (said,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("verl-sync report: ")]
    return said
