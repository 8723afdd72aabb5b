# SPDX-License-Identifier: Apache-2.0
"""What ``verl-sync prove`` makes of digests and checksums, and which command lines it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from verl_sync_plugin.cli.entry import main
from verl_sync_plugin.cli.prove import checks as made
from verl_sync_plugin.cli.prove import table
from verl_sync_plugin.cli.prove.checks import Check
from verl_sync_plugin.report.sync_report import SyncReport
from verl_sync_plugin.rollouts.sglang.digests import digests_of

LOADED = [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
OTHER = [{"a": "1", "b": "2"}, {"a": "3", "b": "x"}]
NOTHING = [{"a": "5", "b": "6"}, {"a": "7", "b": "8"}]


def test_a_parameter_that_a_reset_leaves_alone_proves_nothing() -> None:
    assert made._reset(1, LOADED, NOTHING)[0].passed
    (left,) = made._reset(1, LOADED, [NOTHING[0], {**NOTHING[1], "b": "4"}])
    assert not left.passed and "b of rank 1" in left.found


def test_every_parameter_of_every_rank_has_to_be_as_sglang_loads_it() -> None:
    report = SyncReport(verified_tensors=9)
    assert [each.passed for each in made._synced(1, LOADED, LOADED, report)] == [True, True]
    first, own = made._synced(1, LOADED, OTHER, report)
    assert not first.passed and "b of rank 1" in first.found and own.passed
    assert not made._synced(1, LOADED, LOADED, SyncReport())[1].passed, "a sync that proves nothing itself"
    assert not made._synced(1, LOADED, [LOADED[0], {"a": "3"}], report)[0].passed, "a parameter that is gone"


def test_checksums_are_compared_where_there_are_any() -> None:
    assert made._same_sums(1, {"a": "1"}, {"a": "1"})[0].passed
    assert not made._same_sums(1, {"a": "1"}, {"a": "2"})[0].passed
    assert not made._same_sums(1, {"a": "1"}, "refused")[0].passed
    assert not made._same_sums(1, {}, {})[0].passed, "no parameter was compared"


def test_digests_tell_any_bit_of_parameters_and_buffers() -> None:
    model = torch.nn.BatchNorm1d(4).to(torch.bfloat16)
    before = digests_of(model)
    assert set(before) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    model.running_var.view(torch.int16)[2] ^= 1  # type: ignore[operator, union-attr]
    after = digests_of(model)
    assert [name for name in before if before[name] != after[name]] == ["running_var"]


def test_the_table_names_what_failed() -> None:
    checks = [Check("one", True, "fine").as_dict(), Check("another", False, "bad").as_dict()]
    text = table({"passed": False, "checks": checks})
    assert text.splitlines() == ["one      ok       fine", "another  FAILED   bad", "", "NOT proven"]
    json.dumps(checks)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nowhere"], "no folder with a config.json"),
        ([".", "--syncs", "0"], "--syncs 0: use 1 or more"),
        ([".", "--tp", "2"], "torchrun --nproc-per-node 2"),
    ],
)
def test_refused(words: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(["prove", *[str(tmp_path) if word == "." else word for word in words]])
    assert ended.value.code == 2 and why in capsys.readouterr().err
