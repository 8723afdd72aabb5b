# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks say of trainers and rollouts on GPUs of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.apart import measure as apart_measure
from benchmarks.command import command_line
from benchmarks.phase import separate
from benchmarks.report import pauses_table, table, transfer_table
from benchmarks.soak import apart, measure, trainers


def record(event: str, start: float, seconds: float, **more: Any) -> dict[str, Any]:
    return {"event": event, "start": start, "seconds": seconds, "pid": 1, **more}


def test_paused_is_from_a_servers_first_stop_until_it_goes_on() -> None:
    records = [
        record("whole", 10.0, 1.0, backend="sync_plugin"),
        record("sync", 10.1, 0.7),
        record("update_weights", 10.1, 0.8),
        record("stop", 10.2, 0.1, pid=2),
        record("stop", 10.4, 0.1, pid=2),
        record("go_on", 10.6, 0.1, pid=2),
        record("stop", 10.3, 0.1, pid=3),
        record("go_on", 10.8, 0.1, pid=3),
        record("go_on", 12.0, 0.1, pid=3),  # of another sync
        record("whole", 11.5, 1.0, backend="naive"),  # of the colocated replica beside it
    ]
    (sync,) = separate.syncs(records)
    assert sync.outer == {"call": 1.0, "trainer": 0.7, "rollout": 0.8, "paused": 0.6}
    assert (sync.stages["update_weights"], sync.stages["phase"]) == (0.8, 1.0)


def sync(call: float, paused: float, load: float | None = None) -> dict[str, Any]:
    report = {} if load is None else {"stage/engine_load": load}
    return {"stages": {"update_weights": call / 2}, "outer": {"call": call, "paused": paused}, "report": report}


def result(**machine: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "settings": {"rollout_gpus": 1, "gpus": 1, "rollout_tp": 1},
        "stages": dict.fromkeys(("sleep", "resume_weights", "update_weights", "resume_kv", "phase"), 0.1),
        "bytes": 4_000_000_000,
        "peak_device_bytes": None,
        "peak_host_bytes": 0,
    }
    ours = {**common, "variant": "plugin", "samples": {"syncs": [sync(9, 9, 9), sync(0.08, 0.03, 0.01)]}}
    stock = {**common, "variant": "stock", "samples": {"syncs": [sync(9, 9), sync(0.8, 0.7)]}}
    where = {"gpu": "H200", "gpus": 2, **machine}
    about = {"versions": {}, "commit": "c", "date": "d"}
    return {"case": "separate-x", "machine": where, **about, "runs": [ours, stock]}


def test_table_compares_pauses_and_the_rate_with_the_link() -> None:
    lines = table.render([result(link_bytes_per_second=500_000_000_000)]).splitlines()
    assert "| separate-x | stock | 800 ms | 400 ms | 700 ms (1.75 × ranks) | – | – | 1 |" in lines
    paused = "30 ms (0.75 × ranks, 3.00 × load)"
    assert f"| separate-x | plugin | 80 ms | 40 ms | {paused} | 10 ms | 400 GB/s, 80% of 500 | 1 |" in lines
    assert "| 400 GB/s |" in table.render([result()]), "a link that was not measured is not compared with"


@pytest.mark.parametrize("kind", [kind for kind in trainers.KINDS if kind.startswith(trainers.SEPARATE)])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_trainer_is_soaked_apart(kind: str, device: str) -> None:
    args = measure.arguments(["--model", "small", "--trainer", kind, "--device", device, "--out", "x"])
    assert f"--trainer {kind}" in command_line("soak", args)


def test_the_rollout_sees_the_second_of_the_visible_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(apart.VISIBLE, "5,3")
    assert apart.second_gpu("cuda") == {apart.VISIBLE: "3"}
    monkeypatch.setenv(apart.VISIBLE, "5")
    assert apart.second_gpu("cuda") == {apart.VISIBLE: "5"}, "the only one"
    monkeypatch.delenv(apart.VISIBLE)
    for gpus, number in ((8, "1"), (1, "0")):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        assert apart.second_gpu("cuda") == {apart.VISIBLE: number}
    assert apart.second_gpu("cpu") == {}
    assert apart.VISIBLE not in os.environ


@pytest.mark.parametrize(
    ("variants", "device", "why"),
    [
        ("awex", "cuda", "plugin comes first"),
        ("plugin,awex", "cpu", "with --device cuda"),
        ("plugin,stock", "cpu", "with --device cuda"),
        ("plugin,awex", "cuda --trainer fsdp2", "no other trainer"),
        ("x", "cuda", "unknown"),
    ],
)
def test_a_peer_is_measured_behind_the_plugin(
    variants: str, device: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--case c --model tiny --variants {variants} --device {device} --out o".split()
    with pytest.raises(SystemExit):
        apart_measure.arguments(words)
    assert why in capsys.readouterr().err


def test_the_transfer_of_a_separate_trainer_is_compared_with_the_link() -> None:
    run: dict[str, Any] = {
        "variant": "plugin",
        "settings": {"harness": "transfer", "bucket_mb": 8, "hashed": True, "tensors": 3},
        "stages": {"phase": 0.02},
        "bytes": 4_000_000_000,
        "samples": {"syncs": [{"seconds": 0.02, "report": {"rollout_stages": {"engine_load": 0.01}}}]},
    }
    run["samples"]["first_syncs"] = run["samples"]["syncs"]
    case = {"case": "t", "machine": {"gpu": "H100", "gpus": 2, "link_bytes_per_second": 500_000_000_000}, "runs": [run]}
    assert transfer_table.render([case])[-1].endswith("reads and writes for 10.0 ms: 400 GB/s, 80% of 500.")
    run["samples"]["syncs"][0]["report"]["delivery"] = "broadcast"
    assert transfer_table.render([case])[-1].endswith("what has arrived on its own GPU for 10.0 ms."), "not the link"
    run["samples"]["syncs"][0]["report"]["delivery"] = "direct"
    case["machine"] = {"gpu": "H100", "gpus": 2}
    assert "GB/s" not in transfer_table.render([case])[-1], "a link that was not measured is not compared with"


def peer_run(variant: str, seconds: float, first: dict[str, float] | None = None, **report: float) -> dict[str, Any]:
    samples = {
        "syncs": [{"seconds": seconds, "report": report}],
        "first_syncs": [{"seconds": 9.0, "report": first or report}],
    }
    settings = {"harness": "transfer", "model": "7b", "bucket_mb": 8, "hashed": variant == "plugin", "tensors": 3}
    return {
        "variant": variant, "settings": settings, "stages": {"phase": seconds}, "bytes": 10**9, "samples": samples,
    }  # fmt: skip


def peer_result(case: str, *runs: dict[str, Any], gpu: str = "H200", **versions: str) -> dict[str, Any]:
    return {"case": case, "machine": {"gpu": gpu, "gpus": 2}, "versions": versions, "runs": list(runs)}


def test_a_peers_seconds_stand_in_the_table_with_what_they_leave_out() -> None:
    registered = peer_run("checkpoint-engine", 2, {"registration_seconds": 8.5}, registration_seconds=0.3)
    case = peer_result("t", peer_run("stock", 0.2), peer_run("plugin", 0.05), registered)
    (row,) = [line for line in transfer_table.render([case]) if line.startswith("| t |")]
    cells = row.split(" | ")
    assert cells[2:6] == ["200 ms", "**50.0 ms**", "4.0×", "checkpoint-engine 0.4.2: 2000 ms, 40.0 × the plugin's"]
    assert "into pinned host memory (0.30 s; 8.50 s at first)" in cells[6] and "hashes nothing" in cells[6]
    assert len(cells) == len(transfer_table.HEAD)
    newer = {**case, "versions": {"checkpoint-engine": "0.5"}}
    assert "| checkpoint-engine 0.5: 2000 ms" in "\n".join(transfer_table.render([newer]))


def test_stock_of_another_visit_is_named_beside_a_peer() -> None:
    case = peer_result("t", peer_run("plugin", 0.05), peer_run("awex", 0.25, writer_seconds=0.2))
    elsewhere = peer_result("other", peer_run("plugin", 0.06), peer_run("stock", 0.3))
    text = "\n".join(transfer_table.render([case, elsewhere]))
    assert "| t | 8 MiB | 300 ms (another visit) | **50.0 ms** |  | awex 0.9.0: 250 ms, 5.0 × the plugin's |" in text
    assert "the plugin's 9.00 s, of a later one its writer takes 200 ms; stock was not measured beside it, its" in text
    assert "300 ms are those of `other`" in text
    for unlike in (
        {**elsewhere, "machine": {"gpu": "H100", "gpus": 2}},
        peer_result("other", {**peer_run("stock", 0.3), "settings": {**case["runs"][0]["settings"], "model": "8b"}}),
    ):
        assert "another visit" not in "\n".join(transfer_table.render([case, unlike])), unlike


def test_pauses_are_shown_by_server_and_mode() -> None:
    def run(variant: str, way: str, *samples: tuple[float, float | None]) -> dict[str, Any]:
        syncs = [{"seconds": paused, "gap": gap} for paused, gap in samples]
        settings = {"harness": "pauses", "way": way, "requests": 64}
        return {"variant": variant, "settings": settings, "samples": {"syncs": syncs}}

    runs = [run("stock", "stock", (1.01, None)), run("plugin", "in_place", (0.012, 0.03), (0.02, 0.05), (0.01, 0.02))]
    lines = pauses_table.render([{"case": "p", "runs": runs}])
    assert "| `p` | verl's | – | 64 | 1010 ms | 1010 ms to 1010 ms | – | 1 |" in lines
    assert "| `p` | ours | `in_place` | 64 | 12.0 ms | 10.0 ms to 20.0 ms | 30.0 ms | 3 |" in lines
