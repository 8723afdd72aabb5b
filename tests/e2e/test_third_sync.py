# SPDX-License-Identifier: Apache-2.0
"""Bounds what takes part in the third and fourth sync of a real ``main_ppo``; ``FILES=write`` writes the page."""

import json
from typing import get_args

import pytest

from e2e import checks
from e2e.runs import Run
from pages import DOCS, check
from verl_sync_plugin.transport.protocol import MESSAGES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

# A commit may lower these, not raise them. The third sync also compares what lies in the engine (verify=first).
MOST_FILES = {3: 27, 4: 25}  # of the package, in the processes of trainer and engine together
MOST_ROUNDS = {3: 8, 4: 6}  # collectives of a trainer rank
MOST_KINDS = 7  # of messages between trainer and engine, that of a failure among them


def test_few_files_rounds_and_messages_make_a_sync(drifted: Run) -> None:
    """FSDP2 on two ranks, an engine for each, parameters read where they lie."""
    checks.ended(drifted, steps=3)
    checks.same_weights(drifted)
    later = [report["delivery"] for report in drifted.reports if report["global_steps"] >= 2]
    assert {*later} == {"in place"}, later
    counted = [json.loads(line) for line in (drifted.folder / "counted.jsonl").read_text().splitlines()]
    assert len(get_args(MESSAGES)) <= MOST_KINDS, MESSAGES
    for sync in (3, 4):
        entries = [entry for entry in counted if entry["sync"] == sync]
        assert {entry["role"] for entry in entries} == {"trainer", "engine"}, entries
        files = sorted({file for entry in entries for file in entry["files"]})
        rounds = max((entry["rounds"] for entry in entries), key=len)
        print(f"sync {sync}: {len(rounds)} rounds {rounds}, {len(files)} files", *files, sep="\n")
        assert len(files) <= MOST_FILES[sync], files
        assert 0 < len(rounds) <= MOST_ROUNDS[sync], rounds
    rooms: dict[str, list[str]] = {}
    for file in files:
        room, _, name = file.rpartition("/")
        rooms.setdefault(f"`{room}/`: " if room else "", []).append(f"`{name}`")
    check(DOCS / "one-weight.md", "files", "".join(f"- {room}{', '.join(names)}\n" for room, names in rooms.items()))
