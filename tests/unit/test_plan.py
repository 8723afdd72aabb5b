# SPDX-License-Identifier: Apache-2.0
"""``verl-sync plan``: what it counts, beside what real syncs counted and measured; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from plans import planned, refused

from benchmarks.models import SHAPES
from verl_sync_plugin.cli import main

ROOT = Path(__file__).resolve().parents[2]
H200 = ("--gpu-memory-gb", "140.4")
GIB = 2**30


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Configs of the models that were measured; a config is all there is of them."""
    found = {}
    for size, kind in (("7b", "qwen2"), ("moe-16b", "qwen3_moe")):
        folder = tmp_path_factory.mktemp(size)
        (folder / "config.json").write_text(json.dumps({"model_type": kind, **SHAPES[size]}))
        found[size] = str(folder)
    return found


CASES = [
    ("dense-7b-2gpu-fsdp2-tp2-full", "7b", "--world 2 --rollout-tp 2"),
    ("dense-7b-2gpu-fsdp2-tp1-full", "7b", "--world 2 --rollout-tp 1"),
    ("dense-7b-2gpu-fsdp2-tp2-full-gathered", "7b", "--world 2 --rollout-tp 2 --delivery gathered"),
    ("dense-7b-4gpu-fsdp2-tp4-full", "7b", "--world 4 --rollout-tp 4"),
    ("dense-7b-2gpu-megatron-pp2-tp2-full", "7b", "--trainer megatron --world 2 --pp 2 --rollout-tp 2"),
    ("dense-7b-2gpu-megatron-tp2-tp2-full", "7b", "--trainer megatron --world 2 --tp 2 --rollout-tp 2"),
    ("moe-16b-4gpu-megatron-ep4-tp4-full", "moe-16b", "--trainer megatron --world 4 --ep 4 --rollout-tp 4"),
]


@pytest.mark.parametrize(("case", "size", "options"), CASES, ids=[case for case, _, _ in CASES])
def test_it_predicts_what_was_measured(
    case: str, size: str, options: str, large: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {run["variant"]: run for run in json.loads((ROOT / f"benchmarks/results/{case}.json").read_text())["runs"]}
    samples = runs["plugin"]["samples"]
    first, syncs = samples["first_sync"]["report"], samples["syncs"][1:]
    fraction = {"7b": "0.4", "moe-16b": "0.2"}[size]
    found = planned(capsys, large[size], *options.split(), *H200, "--memory-fraction", fraction)
    staged = found["deliveries"][0]
    assert found["tensors"] == first["tensors"] and not found["warnings"]
    if found["buckets_exact"]:
        assert (staged["buckets"], staged["bytes"]) == (first["buckets"], first["nbytes"])
    assert staged["bytes"] == pytest.approx(first["nbytes"], rel=0.15)
    assert staged["staging_bytes"] == pytest.approx(first["peak_device_bytes"], rel=0.02)
    seconds = median(sync["stages"]["update_weights"] for sync in syncs)
    assert found["seconds"]["update_weights"] == pytest.approx(seconds, rel=0.35)
    low, high = found["seconds"]["phase"]
    assert low < median(sync["stages"]["phase"] for sync in syncs) < 1.25 * high
    if "stock" in runs:  # which keeps no cache, so its peak is what must be held
        peak = max(sync["peak_device_bytes"] for sync in runs["stock"]["samples"]["syncs"])
        assert max(each["total"] for each in found["memory"]) == pytest.approx(peak, rel=0.1)


def test_text_for_tiny_qwen2(tiny_model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", tiny_model("qwen2"), "--world", "2"]) == 0
    text = capsys.readouterr().out
    for part in (
        "27 tensors, 0.231 MB of bf16; fsdp2 on 2 GPUs -> TP1",
        "first sync: sharded\n  27 tensors",
        "later syncs: direct\n  read where they lie: nothing is staged",
        "engine loads by the copy plan from the second sync on: all tensors",
        "only the first sync knows",
        "predicted, from the links below: update_weights",
        "without --gpu-memory-gb",
    ):
        assert part in text


@pytest.mark.parametrize(
    "options",
    [
        ("--world", "2"),
        ("--trainer", "fsdp", "--world", "3"),
        ("--trainer", "megatron", "--world", "4", "--tp", "2", "--ep", "2", "--etp", "1"),
        ("--trainer", "megatron", "--world", "4", "--pp", "2", "--ep", "2"),
        ("--delivery", "broadcast", "--bucket-mb", "1", "--world", "2"),
    ],
    ids=["fsdp2", "fsdp", "megatron-ep", "megatron-pp", "broadcast"],
)
def test_tiny_moe_by_every_trainer(options: tuple[str, ...], tiny_model: Any, capsys: Any) -> None:
    from safetensors import safe_open

    path = tiny_model("qwen3-moe")
    with safe_open(Path(path) / "model.safetensors", "pt") as checkpoint:
        names = list(checkpoint.keys())
    found = planned(capsys, path, *options)
    assert found["tensors"] == len(names) == 45
    assert found["bytes"] <= found["deliveries"][0]["bytes"] <= 1.6 * found["bytes"]
    assert found["deliveries"][1]["name"] == ("broadcast" if "broadcast" in options else "direct")


def test_json_has_the_keys_of_its_documentation(tiny_model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, tiny_model("qwen2"))
    documented = (ROOT / "docs/plan.md").read_text()
    assert found["schema"] == 1
    for key in (*found, *found["deliveries"][0], *found["memory"][0], *found["seconds"], *found["trainer"]):
        assert f"`{key}`" in documented, key


def test_warns_before_an_oom(large: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    options = (large["7b"], "--world", "2", "--rollout-tp", "2", "--gpu-memory-gb", "80")
    (line,) = planned(capsys, *options, "--memory-fraction", "0.6", code=1)["warnings"]
    assert line.startswith("OOM expected, rollout: 90.") and "--memory-fraction 0.4" in line
    assert not planned(capsys, *options, "--memory-fraction", "0.4")["warnings"], "the remedy helps"
    assert not planned(capsys, *options, "--memory-fraction", "0.6", "--optimizer-offload")["warnings"]
    few = planned(capsys, large["7b"], "--world", "1", "--gpu-memory-gb", "80", code=1)["warnings"]
    assert any("OOM expected, training" in line and "more trainer ranks" in line for line in few)
    tight = planned(capsys, *options, "--memory-fraction", "0.05", code=1)["warnings"]
    assert any("leave no room for its KV cache" in line for line in tight)


def test_delivery_goes_by_nodes_offload_and_family(
    large: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def later(*options: str) -> tuple[str, str]:
        each = planned(capsys, *options)["deliveries"][1]
        return each["name"], each["why"]

    assert later(large["7b"], "--world", "16") == ("exchanged", "16 ranks share out the model, on several nodes")
    assert later(large["7b"], "--world", "16", "--delivery", "gathered") == ("gathered", "asked for")
    assert later(large["7b"], "--param-offload") == ("sharded", "offloaded parameters are staged")
    gemma = {"model_type": "gemma2", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    assert later(str(tmp_path)) == ("sharded", "the engine's own load needs whole tensors")


def test_over_nodes_a_slot_holds_what_its_rank_holds_for_the_node(
    large: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two nodes alike every rank stages its own segment and one of the other node; a rank alone on a node stages all
    of the segments, and those of its node's neighbours come from another node."""
    one = planned(capsys, large["7b"], "--world", "16", "--gpus-per-node", "16", "--delivery", "sharded")
    two = planned(capsys, large["7b"], "--world", "16")
    one_each = planned(capsys, large["7b"], "--world", "2", "--gpus-per-node", "1", "--delivery", "exchanged")
    assert [found["deliveries"][0]["name"] for found in (one, two, one_each)] == ["sharded", "exchanged", "exchanged"]
    assert two["deliveries"][0]["buckets"] > 1.8 * one["deliveries"][0]["buckets"], "half as much fits into a segment"
    assert set(two["seconds"]["links"]) == {"staged", "nvlink", "network"}
    assert "network" not in one["seconds"]["links"]
    assert two["seconds"]["update_weights"] > one["seconds"]["update_weights"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("/no/such/folder",), "/no/such/folder: no such folder; give one that holds"),
        (("{empty}",), "this folder holds no config.json; give the folder of a HF checkpoint"),
        (
            ("{unknown}",),
            "model type `never_heard_of` but Transformers does not recognize this architecture; is transf",
        ),
        (("{broken}",), "config.json' is not a valid JSON file; is transformers new enough for it?"),
        (("{model}", "--bucket-mb", "auto"), "--spare-gb"),
        (("{model}", "--bucket-mb", "0"), "--bucket-mb 0: neither"),
        (("{model}", "--bucket-mb", "half"), "--bucket-mb half: neither"),
        (("{model}", "--world", "0"), "--world 0: must be at least 1"),
        (("{model}", "--tp", "2"), "--tp, --pp and --ep are Megatron's"),
        (("{model}", "--trainer", "megatron", "--tp", "3", "--world", "8"), "use for example --world 3"),
        (("{model}", "--trainer", "megatron", "--pp", "8"), "--pp 8: the model has only 2 layers"),
        (("{model}", "--delivery", "carrier-pigeon"), "--delivery carrier-pigeon: not known; use one of auto"),
        (("{model}", "--delivery", "direct", "--world", "16"), "use --delivery exchanged, or auto"),
        (("{model}", "--delivery", "exchanged", "--world", "8"), "are on one node; use auto"),
        (
            ("{model}", "--delivery", "direct", "--param-offload"),
            "offloaded parameters are staged; use --delivery auto",
        ),
        (("{model}", "--memory-fraction", "80"), "--memory-fraction 80: not above 0 and up to 1"),
        (("{quantized}",), "its checkpoint is quantized"),
    ],
)
def test_refused_in_one_line(
    options: tuple[str, ...], text: str, tmp_path: Path, tiny_model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = {
        "empty": None,
        "unknown": '{"model_type": "never_heard_of"}',
        "broken": "{",
        "quantized": '{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2, '
        '"hidden_size": 64, "vocab_size": 320, "quantization_config": {"quant_method": "fp8"}}',
    }
    folders = {"model": tiny_model("qwen2")}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        folders[name] = str(tmp_path / name)
        if content is not None:
            (tmp_path / name / "config.json").write_text(content)
    assert text in refused(capsys, *(option.format(**folders) for option in options))


def test_a_name_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "give a local folder with config.json" in refused(capsys, "nobody/has-such-a-model")


def test_an_environment_that_cannot_import_the_model_is_named(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the environment of make quickstart is without ``VERL_PLATFORM=cpu``."""

    def stopped(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("Could not import module 'X'. Is it there?") from RuntimeError("no operator nms")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", stopped)
    monkeypatch.setattr("transformers.AutoModelForImageTextToText.from_config", stopped)
    text = refused(capsys, tiny_model("qwen2"), "--world", "1")
    assert "no operator nms" in text and "VERL_PLATFORM=cpu" in text, text


def test_auto_is_what_a_run_would_choose(tiny_model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, tiny_model("qwen2"), "--bucket-mb", "auto", "--spare-gb", "9.5")
    assert found["bucket_mb"] == 512
