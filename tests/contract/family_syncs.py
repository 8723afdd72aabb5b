# SPDX-License-Identifier: Apache-2.0
"""Three syncs of one model family on one rank: real FSDP2 source, real packer, real receiver, SGLang's own class."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from contract import sglang_models
from contract.families import Family
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.copies.packing import Packer
from verl_sync_plugin.engine.load import ModelLoad, refuse_rearranged
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import layers_of
from verl_sync_plugin.rollouts.sglang.model import SGLangModel
from verl_sync_plugin.rollouts.sglang.refusals import refuse_checkpoint
from verl_sync_plugin.trainers.base import wire_policy
from verl_sync_plugin.trainers.fsdp2 import FSDP2Source
from verl_sync_plugin.trainers.naming import checkpoint_rewrite
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import Committed, Manifest
from verl_sync_plugin.verify import DERIVED, Comparison, refuse_changed

CPU = torch.device("cpu")
BUCKET_BYTES = 20_000  # many tensors are torn
POISON = (0x5A, 0xA5)  # unlike on purpose: what neither model loads must not pass for the same


def publish(family: Family, folder: Path) -> None:
    """Writes a random checkpoint as the model's authors would."""
    config = AutoConfig.for_model(family.model_type, **family.config)
    multimodal = type(config) in AutoModelForImageTextToText._model_mapping
    auto = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    quantization = config.__dict__.pop("quantization_config", None)
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    save(model, family, folder)
    if family.hub is not None:
        pattern, replacement = family.hub
        _rewrite(folder, lambda name, tensor: (re.sub(pattern, replacement, name), tensor))
    written = json.loads((folder / "config.json").read_text())
    if family.architecture:
        written["architectures"] = [family.architecture]
    if quantization:
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
    """Gives every parameter and persistent buffer of both models the same new values, which need fp32 as trained ones
    do."""
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
    """SGLang's model, every byte of its parameters the same rubbish."""
    model = sglang_models.build(config)
    for parameter in model.parameters():
        parameter.data.view(torch.uint8).fill_(byte)
    for module in model.modules():
        if not family.padded and hasattr(type(module), "use_padded_loading"):
            module.use_padded_loading = False
    return model


def assert_same(engine: Any, reference: Any, what: str) -> None:
    ours, theirs = sglang_models.held(engine), sglang_models.held(reference)
    assert ours.keys() == theirs.keys()
    different = [key for key in theirs if not torch.equal(ours[key], theirs[key])]
    assert not different, f"{what} leaves {different[:8]} other than SGLang's own load does"


class Pair:
    """A trainer's model, twice: sharded as verl does it, and whole, to save checkpoints from."""

    def __init__(self, folder: Path) -> None:
        from verl.utils.fsdp_utils import apply_fsdp2
        from verl.utils.model import convert_weight_keys, get_hf_auto_model_class

        hf_config = AutoConfig.from_pretrained(folder)
        auto = get_hf_auto_model_class(hf_config)
        self.whole, self.sharded = (auto.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
        apply_fsdp2(self.sharded, {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}, {})
        self.rename = lambda state: convert_weight_keys(state, self.sharded)
        self.policy = wire_policy("bfloat16")
        self.agreement = Agreement(60.0)
        self.open()

    def open(self) -> None:
        """Plans with the policy of now."""
        rewrite, unsaved = checkpoint_rewrite(self.sharded), frozenset(self.sharded.all_tied_weights_keys)
        self.source = FSDP2Source(self.sharded, self.policy, rewrite, self.rename, unsaved)
        self.plan = plan_buckets(tuple(s.base for s in self.source.shards()), BUCKET_BYTES, dist.get_world_size() > 1)
        self.packer = Packer(CPU, self.plan, dist.get_rank(), hashed=True, finite=False)
        self.comparison = Comparison(SyncConfig(), self.agreement, range(dist.get_world_size()), True)

    def meet(self, model: Any) -> ModelLoad:
        """What receives the syncs of an engine's model, once it has said in which dtypes it would have the weights.

        Raises:
            SyncError: the engine leaves out what is sent, or a sync would leave a parameter unwritten.
        """
        load = ModelLoad(SGLangModel(model, dist.get_rank()), Manifest.of(self.plan), CPU)
        if self.policy.learn(self._introduce(load)):
            self.open()
            load = ModelLoad(SGLangModel(model, dist.get_rank()), Manifest.of(self.plan), CPU, load)
            self._introduce(load)
        return load

    def _introduce(self, load: ModelLoad) -> dict[str, str]:
        load.begin()
        self.comparison.note(load.map)
        return self.comparison.learn(self.plan, loaded=False, layers=layers_of(self.whole.config))

    def send(self, load: ModelLoad) -> None:
        """One sync into an engine's model, with its proofs."""
        shards = self.source.shards()
        self.packer.begin()
        load.begin()
        assert load.map == self.comparison.map, "nothing has moved"
        slots = [torch.zeros(self.plan.slot_bytes, dtype=torch.uint8) for _ in range(dist.get_world_size())]
        for index in range(len(self.plan.buckets)):
            self.packer.pack(index, slots[dist.get_rank()], shards)
            dist.all_gather(slots, slots[dist.get_rank()].clone())
            spread = load.manifest.sharded and load.manifest.worlds[index] > 1
            load.load(index, slots if spread else [slots[dist.get_rank()]])
        load.finish()
        if not self.comparison.knows(self.plan):
            self.comparison.learn(self.plan, loaded=True)
        held, weighed = load.held(), torch.empty(0)
        with self.agreement.attempt():
            refuse_changed(held.changed)
            weighed = self.comparison.weighed(self.packer.sums(), Committed(sums=load.sums(), held=held), True)
        self.agreement.settle("verifying")
        self.comparison.compare(weighed)


def load_saved(reference: Any, trained: PreTrainedModel, file: Path) -> None:
    """SGLang's own load of a checkpoint. A tied one has no head, which some classes hold all the same."""
    reference.load_weights(iter(load_file(file).items()))
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


def outcome(family: Family, folder: Path, port: int, more_layers: int = 0) -> str:
    """One cell of the table. Collective.

    Args:
        family: the model.
        folder: for checkpoints.
        port: where SGLang's ranks meet, the first time.
        more_layers: of the engine than of the trainer.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        publish(family, folder / "published")
    dist.barrier()
    try:
        refuse_checkpoint(str(folder / "published"))
    except ValueError as error:
        return "refused: " + str(error).partition(": ")[2].partition(". ")[0]
    pair = Pair(folder / "published")
    home = folder / "published"
    if more_layers:
        home = with_layers(home, more_layers, folder / "other-layers")
    config = sglang_models.start_from(home, rank, world, port, family.attention)
    engine, reference = (poisoned(config, family, byte) for byte in POISON)
    known = SGLangModel(engine, rank)
    load = pair.meet(engine)
    for seed in (1, 2, 3):
        train(pair.whole, pair.sharded, seed)
        if rank == 0:
            save(pair.whole, family, folder / f"step-{seed}")
        dist.barrier()
        if not more_layers:
            load_saved(reference, pair.whole, folder / f"step-{seed}" / "model.safetensors")
        pair.send(load)
        assert_same(engine, reference, f"sync {seed}")
    refuse_rearranged(known, CPU)
    assert load.replayed[0] == pair.plan.tensor_count - len(load.map.left)
    how = _how({str(left.tensor): left.why for left in load.map.left}, pair.plan.tensor_count)
    kept = [each.name for each, *_ in pair.comparison.unwritten]
    why = {reason for name in pair.plan.names if (reason := known.why_skipped(name))}
    left = [f"{', '.join(kept)} left to the engine's host copy"] if kept else []
    return "; ".join(
        [
            how,
            *_not_compared(pair.comparison, pair.plan.tensor_count),
            *left,
            *(f"some left alone: {reason}" for reason in sorted(why)),
        ]
    )


def _how(refused: dict[str, str], total: int) -> str:
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, refused)
    most = max(by_rank, key=len)
    if not most:
        return "exact, replayed"
    why = "; ".join(sorted({reason.partition(":")[0] for reasons in by_rank for reason in reasons.values()}))
    return f"exact, {len(most)} of {total} tensors by the model's own path: {why}"


def _not_compared(comparison: Comparison, total: int) -> list[str]:
    """What of the parameters is not compared with what was sent."""
    found = {name: why for name, why in comparison.left_out.items() if name != DERIVED}
    why = "; ".join(sorted(set(found.values())))
    return [f"{len(found)} of {total} not compared in the engine: {why}"] if found else []
