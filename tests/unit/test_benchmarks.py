# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness without a run: probe lines to medians, the table, the results in the repository."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import machine, schema
from benchmarks.phase import cases, options, parse, summary
from benchmarks.report import table

RESULT_FILES = sorted(table.RESULTS.glob("*.json"))


def line(event: str, rank: int, start: float, seconds: float, **more: Any) -> dict[str, Any]:
    process = "server" if event == "sleep" else "trainer"
    record = {"process": process, "rank": rank, "event": event, "class": "ServerAdapter", "tags": [], "ok": True}
    record |= {"start": start, "seconds": seconds, "t": start + seconds}
    return {**record, **more}


def one_sync(at: float, scale: float) -> list[dict[str, Any]]:
    """A sync of two ranks, the follower's stages being empty, as SGLang's are."""
    lines = [line("sleep", 0, at, 3.0 * scale)]
    for rank, share in ((0, 1.0), (1, 0.01)):
        start = at + 10
        lines += [
            line("resume", rank, start, 0.9 * scale * share, tags=["weights"]),
            line("update_weights", rank, start + 1, (1.2 + 0.1 * rank) * scale),
            line("resume", rank, start + 3, 0.03 * scale * share, tags=["kv_cache"]),
            line(
                "sync",
                rank,
                start,
                (2.5 + 0.1 * rank) * scale,
                peak_device_bytes=int(1e9 * scale) + rank,
                rss_peak_bytes=int(2e9) + rank,
            ),
        ]
    return lines


def stock_lines() -> list[dict[str, Any]]:
    lines = [*one_sync(0, 10.0), *one_sync(100, 1.0), *one_sync(200, 1.2), *one_sync(300, 1.1)]
    next(entry for entry in lines if entry["event"] == "update_weights")["nbytes"] = 15_000
    return lines


def plugin_lines() -> list[dict[str, Any]]:
    lines = [{**entry, "class": "SyncServerAdapter"} for entry in stock_lines()]
    for step in range(4):
        stages = {"resume_weights": 0.01, "update_weights": 0.2 + step / 100, "resume_kv": 0.02, "pack": 0.1}
        for replica in range(2):
            report = {"stages": {**stages, "pack": 0.1 + replica}, "nbytes": 15_000, "buckets": 4}
            lines.append({"event": "sync_report", "global_steps": step, **report})
    return lines


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines), encoding="utf-8")
    return path


def result_of(tmp_path: Path) -> dict[str, Any]:
    log = tmp_path / "log"
    log.write_text("step:1 - timing_s/update_weights:2.5 - \x1b[36mx\x1b[0m\nstep:2 - timing_s/update_weights:1e-1 -\n")
    runs = []
    for variant, lines in (("stock", stock_lines()), ("plugin", plugin_lines())):
        runs.append(summary.summarize(variant, {}, write_lines(tmp_path / f"{variant}.jsonl", lines), log))
    result = machine.result("dense", "python -m benchmarks.phase", runs)
    result["machine"] |= {"gpu": "NVIDIA H200", "gpus": 2}
    return result


def case() -> cases.Case:
    return options.case_of(options.arguments(["--case", "dense", "--model-size", "7b", "--out", "r.json"]))


def test_medians_leave_the_warm_up_out_and_take_the_slowest_rank(tmp_path: Path) -> None:
    first, *measured = parse.syncs(parse.read(write_lines(tmp_path / "probe.jsonl", stock_lines())))
    assert first.outer["call"] == pytest.approx(26.0)
    assert first.bytes == 15_000
    assert parse.medians(measured) == pytest.approx(
        {"sleep": 3.3, "resume_weights": 0.99, "update_weights": 1.43, "resume_kv": 0.033, "phase": 3.3 + 2.86}
    )
    assert [sync.peak_device_bytes for sync in measured] == [1_000_000_001, 1_200_000_001, 1_100_000_001]


def test_order_of_lines_of_different_processes_does_not_matter() -> None:
    lines = stock_lines()
    assert parse.syncs(reversed(lines)) == parse.syncs(lines)


def test_report_splits_the_stages_but_never_the_phase() -> None:
    stock = parse.medians(parse.syncs(stock_lines())[1:])
    measured = parse.syncs(plugin_lines())[1:]
    plugin = parse.medians(measured)
    assert plugin["phase"] == stock["phase"]
    assert plugin["sleep"] == stock["sleep"]
    assert plugin["update_weights"] == pytest.approx(0.22)
    assert plugin["resume_weights"] == pytest.approx(0.01)
    assert measured[0].outer["update_weights"] == pytest.approx(1.3)
    assert measured[0].report["stage/pack"] == pytest.approx(1.1), "the slowest replica counts"
    assert measured[0].report["buckets"] == 4


def test_two_updates_in_one_call_are_one_stage() -> None:
    def adapter_of(entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "start": entry["start"] + 0.5, "t": entry["t"] + 0.5, "seconds": 0.25}

    updates = [entry for entry in stock_lines() if entry["event"] == "update_weights" and entry["start"] < 100]
    first, *measured = parse.syncs([*stock_lines(), *map(adapter_of, updates)])
    assert first.stages["update_weights"] == pytest.approx(13.0 + 0.25)
    assert first.bytes == 30_000
    assert measured == parse.syncs(stock_lines())[1:]


@pytest.mark.parametrize("lines", [stock_lines(), plugin_lines()], ids=["stock", "plugin"])
def test_run_ended_by_its_time_limit_counts_if_it_went_on_until_then(lines: list[dict[str, Any]]) -> None:
    parse.check_cut_short(lines, ended=400.0, least=3)
    with pytest.raises(parse.ProbeError, match="3 measured syncs within the time limit, fewer than 4"):
        parse.check_cut_short(lines, ended=400.0, least=4)
    with pytest.raises(parse.ProbeError, match="no sync in the last 687 s before the time limit: the run stood still"):
        parse.check_cut_short(lines, ended=1000.0, least=3)
    failed = [*lines, line("resume", 0, 390, 1, ok=False)]
    with pytest.raises(parse.ProbeError, match="a call failed"):
        parse.check_cut_short(failed, ended=400.0, least=3)


def test_sync_cut_short_is_not_counted() -> None:
    lines = [entry for entry in stock_lines() if not (entry["event"] == "sync" and entry["start"] > 300)]
    assert len(parse.syncs(lines)) == 3
    failed = [{**entry, "ok": entry["event"] != "sync" or entry["start"] < 300} for entry in stock_lines()]
    assert len(parse.syncs(failed)) == 3


def test_sleep_that_first_comes_after_the_warm_up_is_paired_with_the_next_sync() -> None:
    syncs = parse.syncs(entry for entry in stock_lines() if entry["event"] != "sleep" or entry["start"] > 0)
    assert [sync.stages["sleep"] for sync in syncs] == pytest.approx([0.0, 3.0, 3.6, 3.3])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no complete sync"),
        ([entry for entry in stock_lines() if entry["event"] != "sync"], "no complete sync"),
        ([entry for entry in stock_lines() if entry["rank"] == 0 or entry["start"] < 100], "different numbers"),
    ],
)
def test_incomplete_probe_file_is_refused(lines: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(parse.ProbeError, match=message):
        parse.syncs(lines)


def test_warm_up_alone_gives_no_medians() -> None:
    with pytest.raises(parse.ProbeError, match="after the warm-up"):
        parse.medians([])


@pytest.mark.parametrize(("variant", "lines"), [("plugin", stock_lines()), ("stock", plugin_lines())])
def test_run_of_the_other_variant_is_refused(tmp_path: Path, variant: str, lines: list[dict[str, Any]]) -> None:
    log = tmp_path / "log"
    log.touch()
    with pytest.raises(parse.ProbeError, match=f"not a {variant} run"):
        summary.summarize(variant, {}, write_lines(tmp_path / "probe.jsonl", lines), log)


def test_summary_has_the_form_and_both_clocks(tmp_path: Path) -> None:
    result = result_of(tmp_path)
    assert schema.problems(result) == []
    stock = result["runs"][0]
    assert stock["samples"]["verl_update_weights_s"] == [2.5, 0.1]
    assert stock["bytes"] == 15_000
    assert stock["peak_device_bytes"] == 1_200_000_001
    assert stock["peak_host_bytes"] == 2_000_000_001


def test_traced_syncs_are_not_measured(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("step:1 - timing_s/update_weights:2.5 -\n" * 3)
    probe_file = write_lines(tmp_path / "stock.jsonl", stock_lines())
    run = summary.summarize("stock", {"steps": 1}, probe_file, log)
    assert len(run["samples"]["syncs"]) == len(run["samples"]["verl_update_weights_s"]) == 1
    assert run["stages"]["phase"] == pytest.approx(3.0 + 2.6)
    assert run["peak_device_bytes"] == 1_000_000_001


def test_schema_names_what_is_wrong(tmp_path: Path) -> None:
    good = result_of(tmp_path)
    for change, message in (
        (lambda bad: bad.pop("commit"), "missing 'commit'"),
        (lambda bad: bad.update(extra=1), "unknown 'extra'"),
        (lambda bad: bad["runs"][0].update(variant="other"), "not one of"),
        (lambda bad: bad["runs"][1]["stages"].pop("sleep"), "stages are"),
        (lambda bad: bad["runs"][0]["stages"].update(phase=-1), "not a number of seconds"),
        (lambda bad: bad["runs"][0]["samples"].update(syncs=[]), "missing or empty"),
        (lambda bad: bad.update(runs=[]), "runs: empty"),
    ):
        bad = copy.deepcopy(good)
        change(bad)
        assert any(message in problem for problem in schema.problems(bad)), message


def test_table_shows_both_variants_and_the_speed_up(tmp_path: Path) -> None:
    result = result_of(tmp_path)
    result["runs"][1]["stages"]["phase"] = 0.616
    result["runs"][1]["bytes"] = 4_300_000_000
    result["runs"][0]["bytes"] = 8_600_000_000
    rows = [text for text in table.render([result]).splitlines() if text.startswith("| dense")]
    assert rows[0].split(" | ")[1] == "stock"
    assert "**6.160 s** |  | 2.0 ms | 3080 | 1.1 GiB | 1.9 GiB |" in rows[0]
    assert "| plugin | 3.300 s | 0.010 s | 0.220 s | 0.020 s | **0.616 s** | 10.0× | 2.0 ms | 308 |" in rows[1]
    assert "2 × NVIDIA H200" in table.render([result])
    result["runs"][0]["settings"]["exit_status"] = 124
    assert "| stock (cut short) |" in table.render([result]) and "| plugin |" in table.render([result])
    assert table.render([]) == table.EMPTY


def test_check_tells_stale_from_fresh(tmp_path: Path) -> None:
    page, results = tmp_path / "results.md", tmp_path / "results"
    results.mkdir()
    (results / "dense.json").write_text(json.dumps(result_of(tmp_path)))
    page.write_text(f"head\n{table.BEGIN}\nold\n{table.END}\ntail\n")
    arguments = ["--page", str(page), "--results", str(results)]
    assert table.main([*arguments, "--check"]) == 1
    assert "old" in page.read_text()
    assert table.main(arguments) == 0
    assert table.main([*arguments, "--check"]) == 0
    text = page.read_text()
    assert text.startswith(f"head\n{table.BEGIN}\n| case") and text.endswith(f"{table.END}\ntail\n")
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no part between"):
        table.main(arguments)


@pytest.mark.parametrize("path", RESULT_FILES, ids=[path.name for path in RESULT_FILES])
def test_every_result_in_the_repository_has_the_form(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    assert schema.problems(result) == []
