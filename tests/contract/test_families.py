# SPDX-License-Identifier: Apache-2.0
"""The table in ``docs/families.md``: what a sync does for every family that transformers and SGLang build on a CPU."""

import asyncio
import itertools
import json
import re
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from worlds import run_world

from contract import fsdp_models, sglang_models
from contract.families import FAMILIES, Family
from contract.reading import State
from contract.wire import engine_of
from pages import DOCS, check, part
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.rollouts import LocalSpec, rollout_of
from verl_sync_plugin.rollouts.sglang import loader
from verl_sync_plugin.rollouts.sglang.model import SGLangModel
from verl_sync_plugin.sharding_manager import get_sharding_manager
from verl_sync_plugin.trainers.base import WirePolicy
from verl_sync_plugin.verify import DERIVED

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_processes")]
TABLE = DOCS / "families.md"
WORLDS = (1, 2)
# What ``make test`` runs, of every kind: replayed, tied, by the model's own path, mixtures of experts, refused
SOME = (
    "Qwen2", "Llama, tied", "Gemma", "Gemma 2", "Mixtral", "Qwen3-MoE with dense layers", "Qwen3-Next", "DeepSeek-V3",
    "gpt-oss", "Qwen2.5-VL, tied",
)  # fmt: skip
Named = Iterator[tuple[str, torch.Tensor]]
Found = dict[int, dict[str, str]]  # by number of ranks, by family
CPU = torch.device("cpu")
BUCKET_BYTES = 20_000  # many tensors are torn
POISON = (0x5A, 0xA5)  # unlike on purpose: what neither model loads must not pass for the same


def model_of(family: Family) -> PreTrainedModel:
    """transformers' model with random weights, as its authors have it before they quantize it."""
    config = AutoConfig.for_model(family.model_type, **family.config)
    config.__dict__.pop("quantization_config", None)
    multimodal = type(config) in AutoModelForImageTextToText._model_mapping
    auto = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    return model


def publish(family: Family, folder: Path) -> None:
    """Writes a random checkpoint as the model's authors would."""
    save(model_of(family), family, folder)
    if family.hub is not None:
        pattern, replacement = family.hub
        _rewrite(folder, lambda name, tensor: (re.sub(pattern, replacement, name), tensor))
    written = json.loads((folder / "config.json").read_text())
    if family.architecture:
        written["architectures"] = [family.architecture]
    if quantization := family.config.get("quantization_config"):
        written["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(written))


def save(model: PreTrainedModel, family: Family, folder: Path) -> None:
    """As transformers saves it, but for what it is known to save otherwise than it is published."""
    model.save_pretrained(folder)
    # Published checkpoints have an index, in which some of SGLang's models look for a vision tower
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    if family.transposed:
        _rewrite(folder, lambda name, t: (name, t.mT.contiguous() if re.search(family.transposed, name) else t))


def _rewrite(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    save_file(dict(change(name, tensor) for name, tensor in load_file(file).items()), file, {"format": "pt"})


@torch.no_grad()
def train(model: PreTrainedModel, sharded: torch.nn.Module, seed: int) -> None:
    """Gives all parameters and persistent buffers of both models the same new values, which need fp32."""
    generator = torch.Generator().manual_seed(seed)
    twins = sharded.state_dict(keep_vars=True)
    for name, whole in model.state_dict(keep_vars=True).items():
        if not whole.is_floating_point():
            continue
        whole.copy_(torch.randn(whole.shape, generator=generator))
        twin: Any = twins[name]
        placed = hasattr(twin, "device_mesh")
        twin.copy_(distribute_tensor(whole.detach(), twin.device_mesh, twin.placements) if placed else whole)


def poisoned(config: Any, family: Family, byte: int) -> Any:
    """SGLang's model, every byte that a sleep loses the same rubbish: SGLang itself brings back buffers alone."""
    model = sglang_models.build(config)
    for tensor in () if keeps_copy(config.hf_config.architectures) else sglang_models.plain(model).values():
        tensor.reshape(-1).view(torch.uint8).fill_(byte)
    for parameter in model.parameters():
        if parameter.dim() or byte == POISON[0]:  # SGLang's load does not write the scales of a KV cache
            parameter.data.reshape(-1).view(torch.uint8).fill_(byte)
    for module in model.modules():
        if not family.padded and hasattr(type(module), "use_padded_loading"):
            module.use_padded_loading = False
    return model


def keeps_copy(architectures: list[str]) -> bool:
    """True if an engine keeps a host copy of its weights while it sleeps."""
    spec = LocalSpec("", {"architectures": architectures}, 1, "bfloat16", 0.4, True, True, SyncConfig())
    return bool(rollout_of("sglang").prepare_local(spec).arguments[0]["enable_weights_cpu_backup"])


def pair(folder: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A trainer's model, twice: whole, to save checkpoints from, and sharded as verl does it."""
    from verl.utils.fsdp_utils import apply_fsdp2
    from verl.utils.model import get_hf_auto_model_class

    auto = get_hf_auto_model_class(AutoConfig.from_pretrained(folder))
    whole, sharded = (auto.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    apply_fsdp2(sharded, {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}, {})
    return whole, sharded


def load_saved(reference: Any, trained: PreTrainedModel, checkpoint: Named) -> None:
    """SGLang's own load of a checkpoint. A tied one has no head, which some classes hold all the same."""
    reference.load_weights(checkpoint)
    own = dict(reference.named_parameters())
    if "lm_head.weight" in own and "lm_head.weight" in trained.all_tied_weights_keys:
        reference.load_weights(iter([("lm_head.weight", trained.get_input_embeddings().weight.detach())]))


def with_layers(config: Path, more: int, folder: Path) -> Path:
    """Writes the config of an engine that has other layers than the trainer's model; returns its folder."""
    written = json.loads((config / "config.json").read_text())
    text = written.get("text_config", written)
    key = next((key for key in ("num_hidden_layers", "n_layer") if key in text), "")
    before = text[key] if key else len(text["layers_block_type"])
    text |= {key: before + more} if key else {}
    for name, each in list(text.items()):
        if isinstance(each, list) and len(each) == before and "layer" in name:
            text[name] = [*each, each[-1]][: before + more]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def outcome(
    family: Family, folder: Path, more_layers: int = 0, arguments: dict[str, Any] | None = None,
    change: Callable[[WirePolicy, State], Named] = lambda policy, saved: iter(saved.items()),
) -> str:  # fmt: skip
    """Returns one cell of the table; collective. ``change`` makes of a saved checkpoint what SGLang is to load."""
    rank = dist.get_rank()
    if rank == 0:
        publish(family, folder / "published")
    dist.barrier()
    try:
        rollout_of("sglang").refuse_checkpoint(str(folder / "published"))
    except ValueError as error:
        return "refused: " + str(error).partition(": ")[2].partition(". ")[0]
    whole, sharded = pair(folder / "published")
    home = folder / "published"
    if more_layers:
        home = with_layers(home, more_layers, folder / "other-layers")
    config = sglang_models.start_from(home, family.attention, **arguments or {})
    engine, reference = (poisoned(config, family, byte) for byte in POISON)
    settings = SyncConfig(timeout_seconds=20.0, verify="always", delivery="staged")
    endpoint = engine_of(engine, dist.get_world_size())
    manager_class = get_sharding_manager("fsdp2", "sglang")
    manager = manager_class(fsdp_models.engine_of(sharded), endpoint, settings, BUCKET_BYTES, CPU)
    try:
        for seed in (1, 2, 3):
            train(whole, sharded, seed)
            if rank == 0:
                save(whole, family, folder / f"step-{seed}")
            dist.barrier()
            asyncio.run(manager.update_weights([], seed))
            if not more_layers:
                saved = load_file(folder / f"step-{seed}" / "model.safetensors")
                load_saved(reference, whole, change(manager.trainer.policy, saved))
            sglang_models.check_same(engine, reference, f"sync {seed}")
    finally:
        manager.sender.close()
        manager.connection.close()
        loader._sessions.clear()
    plan, comparison = manager.planned, manager.comparison
    assert plan is not None and comparison.map is not None
    left, total = comparison.map.not_copied, len(plan.names)
    assert manager.report.replayed_tensors == (0 if comparison.map.why_own_load else total)
    unlike = {name: why for name, why in comparison.left_out.items() if name != DERIVED}
    kept = [each.name for each, *_ in comparison.unwritten]
    known = SGLangModel(engine, rank)
    skipped = {reason for name in plan.names if (reason := known.why_skipped(name))}
    unread = [name for name, many in zip(comparison._names, comparison._read.times.tolist(), strict=True) if many <= 0]
    assert all(name in unlike or known.why_skipped(name) for name in unread), unread
    said = [_how(sorted({each.why for each in left} or {*filter(None, [comparison.map.why_own_load])}))]
    if unlike:
        why = "; ".join(sorted(set(unlike.values())))
        said.append(f"{len(unlike)} of {total} not compared in the engine: {why}")
    if kept:
        said.append(f"{', '.join(kept)} left as the engine began with it")
    if keeps_copy(config.hf_config.architectures):
        said.append("asleep with a host copy")
    return "; ".join([*said, *(f"some left alone: {reason}" for reason in sorted(skipped))])


def _how(left: list[str]) -> str:
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, left)
    why = "; ".join(sorted({reason.partition(":")[0] for reasons in by_rank for reason in reasons}))
    return f"exact, by the model's own path: {why}" if why else "exact, replayed"


def in_turn(folder: Path, cells: Mapping[str, Callable[[Path], str]]) -> dict[str, str]:
    """Returns the outcome of each cell, which is an error's text where it raised one."""
    found: dict[str, str] = {}
    for called, cell in cells.items():
        place = folder / str(len(found))
        try:
            found[called] = cell(place)
        except Exception as error:
            traceback.print_exc()
            found[called] = f"{type(error).__name__}: {error}"
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)
    return found


def outcomes(folder: Path, names: tuple[str, ...], kinds: tuple[str, ...] = ("",)) -> dict[str, str]:
    """Plays some families in turn, of some kinds: tied or untied, or with one layer more or less in the engine."""
    cells: dict[str, Callable[[Path], str]] = {}
    for name, kind in itertools.product(names, kinds):
        family, more = FAMILIES[name], 0 if kind.endswith("tied") else int(kind or 0)
        built = family.tied(kind == "tied") if kind.endswith("tied") else family
        cells[f"{name}, {kind}" if kind else name] = partial(outcome, built, more_layers=more)
    return in_turn(folder, cells)


def found_by(worlds: tuple[int, ...], names: tuple[str, ...], folder: Path, finds: Any = outcomes) -> Found:
    by_world = {}
    for world in worlds:
        first, *others = run_world(world, finds, folder / str(world), names, timeout=1800.0)
        assert all(other == first for other in others), "ranks found different things"
        by_world[world] = first
    return by_world


def written(page: Path) -> Found:
    """Returns what the table of a page says."""
    rows = [line.strip("| ").split(" | ") for line in part(page.read_text(), "families").splitlines()[2:]]
    one = {name: alone for names, alone, _ in rows for name in names.split("; ")}
    two = {name: one[name] if both == "the same" else both for names, _, both in rows for name in names.split("; ")}
    return {1: one, 2: two}


def test_some_families_are_what_the_table_says(tmp_path: Path) -> None:
    assert found_by((2,), SOME, tmp_path)[2] == {name: written(TABLE)[2][name] for name in SOME}


def of_kinds(names: tuple[str, ...], kinds: tuple[str, ...], folder: Path) -> dict[str, str]:
    """Returns the outcome of each kind, without those that are refused in the driver."""
    (found,) = run_world(1, outcomes, folder, names, kinds, timeout=1800.0)
    return {name: what for name, what in found.items() if not what.startswith("refused: ")}


def some_or_all(*more: str) -> Any:
    every = pytest.param(tuple(FAMILIES), marks=pytest.mark.extended)
    return pytest.mark.parametrize("names", [(*SOME, *more), every], ids=["some", "all"])


# These have a head of their own in SGLang 0.5.12
OWN_HEAD = {
    "Mixtral", "Phi-1.5", "StableLM", "Arcee", "Qwen2-MoE", "Qwen3-MoE", "Qwen3-Next", "OLMoE", "GLM-4.5",
    "GLM-4.7-Flash", "gpt-oss",
}  # fmt: skip


@some_or_all("Cohere", "Cohere 2", "GPT-2")
def test_tied_or_not_the_engine_has_the_trainers_head_or_it_is_named(names: tuple[str, ...], tmp_path: Path) -> None:
    kinds = of_kinds(names, ("tied", "untied"), tmp_path)
    fine = r"exact, |SyncError(?s:.*) leaves out 1 of .*: lm_head\.weight \("
    odd = {name: what for name, what in kinds.items() if not re.match(fine, what)}
    # transformers cannot build it
    assert odd.keys() <= {"Gemma 3, multimodal, untied"}, odd
    exact = {name for name, what in kinds.items() if what.startswith("exact")}
    assert {name.removesuffix(", tied") for name in exact} >= OWN_HEAD & {*names}


@some_or_all()
def test_other_numbers_of_layers_are_named(names: tuple[str, ...], tmp_path: Path) -> None:
    other = of_kinds(names, ("-1", "+1"), tmp_path)
    assert len(other) > 1.7 * len(names)
    wrong = {name: what for name, what in other.items() if not re.search(r"Error: (?s:.*)\b(layers|h)\.\d", what)}
    assert not wrong, wrong


def test_a_family_of_which_the_model_loads_some_weights_itself_on_four_ranks(tmp_path: Path) -> None:
    """SGLang loads DeepSeek's CPU tensors in threads of its own, which no dispatch mode of ours would see."""
    what = found_by((4,), ("DeepSeek-V3",), tmp_path)[4]["DeepSeek-V3"]
    assert what.startswith("exact, "), what


def table(found: Found) -> str:
    """A row for every outcome, those of few families first."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name in FAMILIES:
        one, two = (found[world][name] for world in WORLDS)
        alike.setdefault((one, "the same" if two == one else two), []).append(name)
    rows = ["| families | one rank | two ranks |", "| --- | --- | --- |"]
    for (one, two), names in sorted(alike.items(), key=lambda item: len(item[1])):
        rows.append(f"| {'; '.join(names)} | {one} | {two} |")
    return "\n".join(rows) + "\n"


@pytest.mark.extended
def test_every_family_is_exact_or_refused_by_name_as_the_table_says(tmp_path: Path) -> None:
    """Never wrong, never an error from inside."""
    found = found_by(WORLDS, tuple(FAMILIES), tmp_path)
    check(TABLE, "families", table(found))
    fine = re.compile(r"exact, |refused: \w+(For\w+)? .*cannot be synced to SGLang: ")
    assert not {(name, world): what for world in WORLDS for name, what in found[world].items() if not fine.match(what)}
