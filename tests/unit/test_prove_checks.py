# SPDX-License-Identifier: Apache-2.0
"""What ``verl-sync prove`` makes of digests and checksums, and which command lines it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers

from verl_sync_plugin.cli import main, prove
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.rollouts.sglang.loader import digests_of


def test_a_sync_that_compares_a_part_says_how_many_and_one_that_compares_nothing_proves_nothing() -> None:
    part = prove._own_proof(1, SyncReport(verified_tensors=57, not_comparable=3))
    assert part.passed and (part.compared, part.not_comparable) == (57, 3)
    assert part.found.startswith("57 tensors compared in the engine, 3 not comparable: the log names these")
    assert not prove._own_proof(1, SyncReport(not_comparable=60)).passed
    full = SyncReport(verified_tensors=57, not_comparable=282, no_room="beside rank 1: no device memory")
    crowded = prove._own_proof(1, full)
    assert not crowded.passed, "what is left out for want of memory is no property of the model"
    assert "for want of memory (beside rank 1: no device memory). A lower --gpu-memory-ut" in crowded.found


def test_what_ends_the_run_for_want_of_memory_is_a_failed_check_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the way to the device; as JSON alone on the standard output."""
    (tmp_path / "config.json").write_text("{}")

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.02 GiB.")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    assert main(["prove", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (check,) = found["checks"]
    assert not found["passed"] and not check["passed"] and (found["compared"], found["not_comparable"]) == (0, 0)
    assert check["found"].startswith("loading the trainer's model failed. rank 0: torch.OutOfMemoryError: CUDA out of")
    assert "Tried to allocate 1.02 GiB. Give the trainer's model more room: --trainer-dtype bfloat16" in check["found"]


def test_digests_tell_any_bit_of_parameters_and_buffers() -> None:
    model = torch.nn.BatchNorm1d(4).to(torch.bfloat16)
    before = digests_of(model)
    assert set(before) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    model.running_var.view(torch.int16)[2] ^= 1  # type: ignore[operator, union-attr]
    after = digests_of(model)
    assert [name for name in before if before[name] != after[name]] == ["running_var"]


def test_the_table_names_what_failed_and_does_not_call_a_part_the_whole() -> None:
    checks = [asdict(prove.Check("one", True, "fine")), asdict(prove.Check("another", False, "bad"))]
    text = prove.table({"passed": False, "not_comparable": 0, "checks": checks})
    assert text.splitlines() == ["one      ok       fine", "another  FAILED   bad", "", "NOT proven"]
    checks = [asdict(prove.Check("one", True, "some", compared=5, not_comparable=2))]
    *_, row, _, last = prove.table({"passed": True, "compared": 5, "not_comparable": 2, "checks": checks}).splitlines()
    assert row == "one  partly   some"
    assert last.endswith("the syncs themselves compared 5 tensors in the engine, and could not compare 2")
    checks[0]["not_comparable"] = 0
    assert prove.table({"passed": True, "compared": 5, "not_comparable": 0, "checks": checks}).endswith("\nproven")


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
