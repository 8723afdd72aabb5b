# SPDX-License-Identifier: Apache-2.0
"""``verl-sync report``: a page about the syncs of a run, and a trace of one of them, from its report file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PAGE = "sync-report.html"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report", help="a page (HTML) about the syncs of a run, made from its report file"
    )
    parser.add_argument("source", metavar="RUN", type=Path, help="the report file, or the folder that holds it")
    parser.add_argument("--out", type=Path, help=f"where the page goes; {PAGE} next to the report file by default")
    parser.add_argument("--run", type=int, dest="number", help="which run of the file, from 1 on; the last by default")
    parser.add_argument("--against", metavar="RUN", type=Path, help="another run to compare with: its last, if several")
    parser.add_argument("--trace", type=Path, help="also write a trace of one sync, for https://ui.perfetto.dev")
    parser.add_argument("--step", type=int, help="of which step the trace is; the last by default")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Writes the page and the trace, and returns the exit code. Raises ValueError, with the remedy, where the report
    file or an option cannot be used, or matplotlib is missing."""
    # Here, so that the doctor also starts where the package is broken
    from verl_sync_plugin.cli.page import page_of, read_run, sync_of_step, trace_of

    if arguments.step is not None and arguments.trace is None:
        raise ValueError("--step says of which sync the trace is; say where that goes with --trace OUT.json")
    source: Path = arguments.source
    found = read_run(source, arguments.number)
    against = None if arguments.against is None else read_run(arguments.against)
    if arguments.trace is not None:
        sync = sync_of_step(found, arguments.step)
        _write(arguments.trace, json.dumps(trace_of(sync, found.versions)))
        print(f"{arguments.trace}: the sync of step {sync.step}; open it in https://ui.perfetto.dev")
    whole = source.resolve()
    page = arguments.out or (source if source.is_dir() else source.parent) / PAGE
    try:
        text = page_of(found, whole.name if source.is_dir() else f"{whole.parent.name}/{whole.name}", against)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: the page is drawn by matplotlib; pip install matplotlib") from error
    _write(page, text)
    of = f", run {found.number} of {found.runs}" if found.runs > 1 else ""
    print(f"{page}: {len(found.syncs)} syncs{of}")
    if found.unread:
        print(f"left out, for they are no JSON: {', '.join(found.unread)}")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}; name another place") from error
