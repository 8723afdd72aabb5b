# SPDX-License-Identifier: Apache-2.0
"""The table in ``docs/families.md``: what a sync does for every family that transformers and SGLang build on a CPU.

``make families`` writes the table anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from contract.families import FAMILIES
from ports import free_port

pytestmark = pytest.mark.slow
TABLE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
BEGIN, END = "<!-- families:begin -->\n", "<!-- families:end -->\n"
WORLDS = (1, 2)
# What ``make test`` runs, of every kind: replayed, tied, by the model's own path, mixtures of experts, refused
SOME = (
    "Qwen2",
    "Llama, tied",
    "Gemma",
    "Gemma 2",
    "Mixtral",
    "Qwen3-MoE with dense layers",
    "Qwen3-Next",
    "DeepSeek-V3",
    "gpt-oss",
    "Qwen2.5-VL, tied",
)
Found = dict[int, dict[str, str]]  # by number of ranks, by family


def run_rank(rank: int, world: int, folder: str, port: int, names: tuple[str, ...]) -> None:
    """One trainer rank beside one tensor-parallel rank, for some families in turn; entry of a spawned process."""
    from contract.family_syncs import outcome

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    found = {}
    for name in names:
        place = Path(folder) / name.replace(" ", "-")
        try:
            found[name] = outcome(FAMILIES[name], place, port)
        except Exception as error:
            traceback.print_exc()
            found[name] = f"FAILED: {type(error).__name__}: {error}"
        dist.barrier()
        if rank == 0:
            shutil.rmtree(place, ignore_errors=True)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


def found_by(worlds: tuple[int, ...], names: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Found:
    by_world = {}
    for world in worlds:
        folder = tmp_path_factory.mktemp(f"families-{world}")
        port = free_port()
        mp.spawn(run_rank, args=(world, str(folder), port, names), nprocs=world)
        first, *others = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(world))
        assert all(other == first for other in others), "ranks found different things"
        by_world[world] = first
    return by_world


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return found_by(WORLDS, tuple(FAMILIES), tmp_path_factory)


def test_some_families_are_what_the_table_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = found_by((2,), SOME, tmp_path_factory)[2]
    rows = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    written = {name: one if two == "the same" else two for name, one, two in rows}
    assert found == {name: written[name] for name in SOME}


def run_kinds(_: int, folder: str, port: int) -> None:
    """Every family tied and untied, and with one layer more and less in the engine; entry of a spawned process."""
    from contract.family_syncs import outcome

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    found: dict[str, str] = {}
    for name, family in FAMILIES.items():
        for kind in ("tied", "untied", "-1", "+1"):
            built, more = (family.tied(kind == "tied"), 0) if kind.endswith("tied") else (family, int(kind))
            place = Path(folder) / str(len(found))
            try:
                found[f"{name}, {kind}"] = outcome(built, place, port, more)
            except Exception as error:
                traceback.print_exc()
                found[f"{name}, {kind}"] = f"{type(error).__name__}: {error}"
            shutil.rmtree(place, ignore_errors=True)
    (Path(folder) / "kinds.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What became of each, without those that are refused in the driver."""
    folder = tmp_path_factory.mktemp("kinds")
    port = free_port()
    mp.spawn(run_kinds, args=(str(folder), port), nprocs=1)
    found: dict[str, str] = json.loads((folder / "kinds.json").read_text())
    return {name: what for name, what in found.items() if not what.startswith("refused: ")}


def test_tied_or_not_the_engine_has_the_trainers_head_or_it_is_named(kinds: dict[str, str]) -> None:
    fine = r"exact, |SyncError(?s:.*) leaves out 1 of .*: lm_head\.weight \("
    odd = {name: what for name, what in kinds.items() if name.endswith("tied") and not re.match(fine, what)}
    # transformers cannot build it
    assert odd.keys() <= {"Gemma 3, multimodal, untied"}, odd
    exact = {name.removesuffix(", tied") for name, what in kinds.items() if what.startswith("exact")}
    # These have a head of their own in SGLang 0.5.12
    assert exact >= {"Mixtral", "Phi-1.5", "StableLM", "Arcee", "Qwen2-MoE", "Qwen3-MoE", "Qwen3-Next", "OLMoE"}
    assert exact >= {"GLM-4.5", "GLM-4.7-Flash", "gpt-oss"}


def test_other_numbers_of_layers_are_named(kinds: dict[str, str]) -> None:
    other = {name: what for name, what in kinds.items() if name.endswith(("-1", "+1"))}
    assert len(other) > 100
    both = r"model has (\d+) layers, the engine's (\d+) \(num_hidden_layers\)"
    wrong = {
        name: what
        for name, what in other.items()
        if (said := re.search(both, what)) is None or int(said[2]) - int(said[1]) != int(name[-2:])
    }
    assert not wrong, wrong


def test_a_family_of_which_the_model_loads_some_weights_itself_on_four_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """SGLang loads DeepSeek's CPU tensors in threads of its own, which no dispatch mode of ours would see."""
    what = found_by((4,), ("DeepSeek-V3",), tmp_path_factory)[4]["DeepSeek-V3"]
    assert what.startswith("exact, "), what


@pytest.mark.extended
def test_every_family_is_exact_or_refused_by_name(found: Found) -> None:
    """Never wrong, never an error from inside."""
    odd = {
        (name, world): what
        for world, by_name in found.items()
        for name, what in by_name.items()
        if not re.match(r"exact, |refused: \w+(For\w+)? .*cannot be synced to SGLang: ", what)
    }
    assert not odd


def table(found: Found) -> str:
    rows = ["| model | one rank | two ranks |", "| --- | --- | --- |"]
    for name in FAMILIES:
        one, two = (found[world][name] for world in WORLDS)
        rows.append(f"| {name} | {one} | {'the same' if two == one else two} |")
    return "\n".join(rows) + "\n"


@pytest.mark.extended
def test_the_table_says_what_was_found(found: Found) -> None:
    text = TABLE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    now = before + BEGIN + table(found) + END + after
    if os.environ.get("FAMILIES") == "write":
        TABLE.write_text(now)
    assert TABLE.read_text() == now, "write it anew: make families"
