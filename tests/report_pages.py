# SPDX-License-Identifier: Apache-2.0
"""Report files, and the pages that ``verl-sync report`` makes of them, read by an HTML parser."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from verl_sync_plugin.cli import main
from verl_sync_plugin.report.sync_report import SyncReport

GIB = 2**30
VOID = {"meta", "br", "line", "rect"}
# What version 0.1.0 wrote; the fields that came later are left out
OLD = {
    "event": "sync_report",
    "global_steps": 0,
    "manager": "FSDP2SGLangShardingManager",
    "stages": {"sleep": 0.2, "resume_weights": 0.0625, "update_weights": 7.5, "resume_kv": 0.03125, "pack": 0.25},
    "nbytes": 15_231_233_024,
    "buckets": 25,
    "bucket_bytes": 512 << 20,
    "tensors": 339,
    "peak_device_bytes": GIB,
    "device_used_bytes": {"asleep": 20 * GIB, "weights": 27 * GIB, "synced": 28 * GIB, "awake": 68 * GIB},
    "coverage_expected": 199,
    "coverage_missing": 0,
    "own_bytes": 7_000_000_000,
    "peer_bytes": 8_000_000_000,
    "gathered_bytes": 0,
    "direct_bytes": 0,
}


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
        kept_staging_bytes=GIB,
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
    """A page as a tree that is checked on the way: every start has its end."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.section = ""
        self.attributes: list[tuple[str, str, dict[str, str]]] = []
        self.texts: dict[str, str] = {}
        self.cells: dict[str, list[list[str]]] = {}
        self._ids: list[str] = []
        self._table = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "section":
            self.section = given.get("id", "")
        self.attributes.append((self.section, tag, given))
        if tag == "table":
            self._table = given.get("id", "")
        if tag == "tr":
            self.cells.setdefault(self._table, []).append([])
        if tag in ("td", "th"):
            self.cells[self._table][-1].append("")
        if tag not in VOID:
            self.open.append(tag)
            self._ids.append(given.get("id", ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        assert tag in VOID, tag

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._ids.pop()

    def handle_data(self, data: str) -> None:
        for name in filter(None, self._ids):
            self.texts[name] = self.texts.get(name, "") + data
        if "td" in self.open or "th" in self.open:
            self.cells[self._table][-1][-1] += data

    def parts(self, section: str, tag: str, value: str) -> list[tuple[str, float]]:
        """(part, value) of what is drawn in a section."""
        return [
            (given["data-part"], float(given[value]))
            for where, name, given in self.attributes
            if where == section and name == tag and value in given and "data-part" in given
        ]

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
