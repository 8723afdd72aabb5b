"""The transfer benchmark on the CPU: both variants against one real SGLang server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import schema, table, transfer_models, transfer_table

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_stock_and_plugin_on_one_server(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")  # and nothing else of the checkout
    out = tmp_path / "result.json"
    words = "--case smoke --model tiny-moe --device cpu --buckets 1 --repeat 1 --variants stock,plugin"
    command = [sys.executable, "-m", "benchmarks.transfer", *words.split(), "--out", str(out)]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(out.read_text())
    assert not schema.problems(result)
    stock, plugin = result["runs"]
    assert stock["samples"]["tokens"] == plugin["samples"]["tokens"]
    (report,) = (sample["report"] for sample in plugin["samples"]["syncs"])
    tensors = len(transfer_models.shapes("tiny-moe"))
    assert report["replayed_tensors"] == report["tensors"] == tensors == plugin["settings"]["tensors"]
    assert report["replayed_bytes"] == plugin["bytes"] == stock["bytes"]
    assert {"connect", "pack", "gather", "wait_engine", "engine_load", "commit"} <= report["stages"].keys()
    rows = [line for line in table.render([result]).splitlines() if line.startswith("| smoke")]
    assert [row.split(" | ")[1] for row in rows] == ["stock", "plugin"]


def test_shapes_of_the_models() -> None:
    counts = {}
    for kind in ("dense-7b", "moe-10k", "moe-19k"):
        shapes = transfer_models.shapes(kind)
        assert len(dict(shapes)) == len(shapes)
        numel = 0
        for _, shape in shapes:
            product = 1
            for size in shape:
                product *= size
            numel += product
        counts[kind] = (len(shapes), round(2 * numel / 1e9, 2))
    assert counts == {"dense-7b": (339, 15.23), "moe-10k": (9651, 32.06), "moe-19k": (18867, 32.07)}


def test_results_in_the_repository_have_a_floor_and_a_profile() -> None:
    results = [result for result in table.load(table.RESULTS) if transfer_table.is_transfer(result)]
    assert {result["case"] for result in results} >= {"transfer-dense-7b-1gpu", "transfer-moe-10k-1gpu"}
    for result in results:
        for run in result["runs"]:
            assert run["stages"]["phase"] > run["settings"]["floor_seconds"]
            if run["variant"] == "plugin":
                assert all(
                    s["report"]["replayed_tensors"] == run["settings"]["tensors"] for s in run["samples"]["syncs"]
                )
