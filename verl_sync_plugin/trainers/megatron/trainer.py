# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron engine: tensor, pipeline, virtual pipeline, expert, expert-tensor, context and data parallel.

LoRA weights are merged while they are packed, each rank its own parts. A part of a weight needs one factor whole and of
the other the rows or columns that match it, which the rank has: of a column-parallel weight A is gathered, of a
row-parallel one B, from the tensor-parallel ranks only. No weight is ever whole.

Source: ``LoRAMerge.merge`` of ``megatron.bridge.peft.lora`` for which factor is gathered.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from verl_sync_plugin import log
from verl_sync_plugin.config.refusals import ACTOR, LATE, NO_QAT, refuse_first, refuse_megatron_lora
from verl_sync_plugin.config.settings import MODEL, TURN_OFF
from verl_sync_plugin.layout.tensors import Base, Shard, View
from verl_sync_plugin.lora.merge import targets_of
from verl_sync_plugin.lora.peft import Weight
from verl_sync_plugin.trainers.base import ParameterSource, ServedAdapter, TrainerBackend, WirePolicy, dtype_name
from verl_sync_plugin.trainers.lora import TRAINED, Merge, Merging, refuse_unserved
from verl_sync_plugin.trainers.megatron.bridge import ADAPTED, BridgeReader, NotACopyError
from verl_sync_plugin.trainers.megatron.model import HeldTensor, ModelTensors, flat, unwrapped
from verl_sync_plugin.trainers.megatron.parts import Part, RankLayout, match, replicas
from verl_sync_plugin.trainers.megatron.stream import Guard, StreamSource
from verl_sync_plugin.trainers.naming import tied_head
from verl_sync_plugin.transport.agreement import Agreement

ETP = "megatron.expert_tensor_parallel_size"
_PLAIN = ("ParallelLinearAdapter", "GroupedExpertLinearAdapter")


class MegatronTrainer(TrainerBackend):
    """Reads each rank's own parameters through Megatron-Bridge; a model whose conversion computes comes as the bridge's
    own stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._peft = getattr(self.engine, "peft_cls", None) is not None
        self.serves_adapter = self._peft and not self.engine.model_config.lora.get("merge", False)

    def open_source(self) -> ParameterSource:
        refuse_engine(self.engine)
        bound, merges = self.config.timeout_seconds, self._peft and not self.serves_adapter
        reader = BridgeReader(self.engine.bridge, bound)
        stream = StreamSource(self.stream, self.policy, bound)
        return MegatronSource(self.engine.module, reader, self.policy, stream, self.device, bound, merges)

    def open_adapter(self, source: ParameterSource) -> ServedAdapter:
        return BridgeAdapter(self.engine, self.config.timeout_seconds)

    def stream(self, broken: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Megatron-Bridge's export; LoRA merged, or left out where the engine serves it, and without the copy that it
        makes of a tied embedding. ``broken``: the last one may have been broken off, and the bridge's tasks keep what
        only some ranks have heard, so new ones are made."""
        if broken:
            self.engine._hf_export_tasks = None
        stream, _ = self.engine.get_per_tensor_param()
        left_out = tied_head(self.engine.model_config.hf_config.to_dict())
        # Some releases of Megatron-Bridge add its own name
        return ((n.replace(".base_layer.", "."), tensor) for n, tensor, *_ in stream if n not in left_out)


def refuse_engine(engine: Any) -> None:
    """Raises ValueError when a Megatron engine cannot be synced; names key, value and remedy."""
    off = f"Set it to False, or {TURN_OFF}"
    bridge = "weight sync serves Megatron-Bridge, verl's default, and not the deprecated mbridge"
    megatron_fsdp = getattr(engine.engine_config, "use_megatron_fsdp", False)
    # Megatron then gathers updated parameters in the next forward pass, which comes after the sync
    overlaps = (getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False) for chunk in engine.module)
    refuse_first(
        "actor_rollout_ref.actor.megatron.",
        (engine.vanilla_bridge, "vanilla_mbridge=True", bridge, off),
        (getattr(engine, "_qat_enabled", False), "qat.enable=True", NO_QAT, off),
        (megatron_fsdp, "use_megatron_fsdp=True", "weight sync does not read its shards", off),
        (any(overlaps), *LATE),
    )
    refuse_megatron_lora(engine.engine_config, engine.model_config)


@dataclass(frozen=True)
class AdaptedWeight(Weight):
    """One weight of this rank by Megatron's global name: ``scaling * B @ A`` is added to its local part. ``a`` and
    ``b`` are keys of the factors, alike on the ranks that share them, and ``place_a``, ``place_b`` their places in
    ``ModelTensors.tensors``; ``expert`` is their index in those of several experts (``None``: a factor is a matrix).
    ``experts``: it belongs to experts, whose factors are split by expert tensor parallelism."""

    place_a: int
    place_b: int
    expert: int | None
    adapter: Any
    experts: bool

    @property
    def rank(self) -> int:
        return int(self.adapter.dim)

    @property
    def scaling(self) -> float:
        return float(self.adapter.alpha / self.adapter.dim)


class MegatronSource(Merging):
    """Reads the model chunks of one rank (one per virtual pipeline stage), wrapped or not. ``otherwise`` is the
    bridge's own stream, for a model whose conversion computes. Before ``shards`` comes ``agree_on_layout``."""

    def __init__(
        self, chunks: list[torch.nn.Module], reader: BridgeReader, policy: WirePolicy, otherwise: ParameterSource,
        device: torch.device, timeout_seconds: float, merges: bool,
    ) -> None:  # fmt: skip
        super().__init__(device, timeout_seconds, merges)
        self._policy = policy
        self._bases: list[Base] = []  # empty until the ranks have agreed
        self._parts: list[Part] = []  # of each base, on every rank
        self._model = ModelTensors(chunks)
        self._reader = reader
        self._otherwise = otherwise
        self._places: dict[str, int] = {}  # of this rank's parameters, by name
        self._weights: dict[str, AdaptedWeight] = {}  # of this rank, by name
        self._mergers: dict[str, Merge] = {}
        self._offloaded: dict[int, torch.Tensor] = {}

    def agree_on_layout(self, agreement: Agreement) -> ParameterSource:
        """The ranks exchange their layouts when any of them has changed."""
        if not agreement.any("looking for the trainer's weights", self._changed):
            return self
        self._bases, run = [], f"layout {agreement.new_name()}"
        layout = agreement.step("reading the layout of the trainer", lambda: self._read(run))
        layouts = agreement.gather("exchanging the layout of the trainer", layout)
        if computed := [layout.computed for layout in layouts if layout.computed]:
            if self.prepares:
                agreement.step("looking at the adapters", lambda: refuse_bridges_merge(self._model, computed))
            log.say(f"this model goes through the trainer's own weight stream, which is slower: {computed[0]}")
            return self._otherwise.agree_on_layout(agreement)
        bases = agreement.step("matching the layouts of all ranks", lambda: self._match(layouts))
        self.group = _replica_of(replicas(layouts))
        self._bases = bases
        return self

    def _changed(self) -> bool:
        other, moved = self._model.find_tensors()
        if moved:
            self.kept = None
        if other:
            self._bases = []
        return not self._bases

    def _read(self, run: str) -> RankLayout:
        self.kept, self._mergers = None, {}
        groups = tuple(tuple(dist.get_process_group_ranks(group)) for group in _model_parallel())
        try:
            found = self._reader.read(self._model, run)
            names = {place: part.name for place, part in found.items()}
            adapted = adapted_weights(self._model, names) if self.prepares else ()
            self._weights = {weight.name: weight for weight in adapted}
        except NotACopyError as error:
            return RankLayout((), groups, str(error))
        self._places = {name: place for place, name in names.items()}
        parts = (
            replace(part, adapter=(weight.experts, weight.rank)) if (weight := self._weights.get(part.name)) else part
            for part in found.values()
        )
        return RankLayout(tuple(parts), groups)

    def _match(self, layouts: list[RankLayout]) -> list[Base]:
        """Works out who sends what. Raises ValueError, the same on every rank, where the ranks disagree."""
        ranks, units = next(each for each in match(layouts).items() if dist.get_rank() in each[0])
        bases: list[Base] = []
        self._parts = []
        sent = dict.fromkeys(ranks, 0)  # elements, so that all send about as much
        for unit in units:
            like = unit[0][0]
            wire = getattr(torch, like.dtype)
            if not like.buffer:
                wire = self._policy.of_parameter([view.name for view in like.views], wire)
            for part, holders in unit:
                if not part.views:
                    continue
                sender = min(holders, key=sent.__getitem__)
                sent[sender] += prod(part.shape)
                lengths = tuple(prod(part.shape) if each == sender else 0 for each in ranks)
                key = f"{part.name} (part {', '.join(map(str, part.place))})" if len(unit) > 1 else part.name
                bases.append(Base(key, dtype_name(wire), wire.itemsize, lengths, part.views))
                self._parts.append(part)
        return bases

    def shards(self) -> list[Shard]:
        assert self._bases, "the ranks have not agreed on the layout"
        self.release()
        self._offloaded = self._model.offloaded()
        for weight in self._weights.values():
            for key, place in ((weight.a, weight.place_a), (weight.b, weight.place_b)):
                if key not in self.factors.shards:
                    self.factors.shards[key] = self._factor(weight, key, self._model.tensors[place])
        if self.kept is not None and not self._offloaded:
            return self.kept
        rank = self.rank
        found = [
            self._shard(base, part.name) if base.held(rank) else Shard(base, partial(torch.empty, 0))
            for base, part in zip(self._bases, self._parts, strict=True)
        ]
        if not self._offloaded:
            self.kept = found
        return found

    def _factor(self, weight: AdaptedWeight, key: str, tensor: torch.Tensor) -> Shard:
        """This rank's part of a factor; parts are rows, so one after another they are the whole."""
        rows, columns = tensor.shape[-2:]
        home, first = self._offloaded.get(tensor.untyped_storage()._cdata), rows * columns * (weight.expert or 0)
        whole = weight.rank if key == weight.a else self._model.tensors[self._places[weight.name]].shape[0]
        size = whole // rows
        view = View(key, (rows * size, columns), 0, rows * size * columns)
        base = Base(key, dtype_name(tensor.dtype), tensor.dtype.itemsize, (rows * columns,) * size, (view,))
        return Shard(base, lambda: flat(tensor, home)[first : first + rows * columns])

    def _shard(self, base: Base, name: str) -> Shard:
        """A base of which this rank sends its part of the parameter of that name."""
        tensor, weight = self._model.tensors[self._places[name]], self._weights.get(name)
        home = self._offloaded.get(tensor.untyped_storage()._cdata)
        if weight is not None and name not in self._mergers:
            self._mergers[name] = self.merger(targets_of(weight, tuple(tensor.shape)), 0)
        run = None if home is not None else tensor
        return Shard(base, partial(flat, tensor, home), self._mergers.get(name), run=run)

    def factor_bytes(self, base: int) -> int:
        part = self._parts[base]
        return 0 if part.adapter is None else part.adapter[1] * sum(part.shape) * torch.float32.itemsize

    def gather(self, bases: tuple[int, ...]) -> Generator[None, None, None]:
        """Every rank yields once for each group over which any has something to gather."""
        parts = [self._parts[base] for base in bases]
        for experts in (False, True):
            names = [part.name for part in parts if part.adapter is not None and part.adapter[0] == experts]
            if names:
                mine = (self._weights[name] for name in names if name in self._weights)
                keys = tuple(dict.fromkeys(key for weight in mine for key in weight.keys))
                self.gathered |= yield from self.factors.gather(keys, _group(experts), torch.float32)


def _model_parallel() -> tuple[dist.ProcessGroup, ...]:
    from megatron.core import parallel_state as mpu

    return mpu.get_model_parallel_group(), mpu.get_expert_tensor_model_pipeline_parallel_group()


def _replica_of(members: list[tuple[int, ...]]) -> dist.ProcessGroup | None:
    """This rank's replica as a group. Collective."""
    if len(members[0]) == 1:
        return None
    if len(members) == 1:
        return dist.group.WORLD
    for group in _model_parallel():  # a communicator of its own costs device memory
        # Replicas are alike, so all ranks come to the same choice
        if tuple(dist.get_process_group_ranks(group)) in members:
            return group
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in members])
    return group


def _group(experts: bool) -> dist.ProcessGroup | None:
    """The ranks that share out the factors of a weight of experts, or of any other; ``None`` where there is one."""
    from megatron.core import parallel_state as mpu

    group = mpu.get_expert_tensor_parallel_group() if experts else mpu.get_tensor_model_parallel_group()
    return group if dist.get_world_size(group) > 1 else None


def refuse_bridges_merge(model: ModelTensors, computed: Sequence[str]) -> None:
    """Raises ValueError where the stream of Megatron-Bridge (0.5.1) merges adapters wrongly: into weights whose
    conversion computes (``computed`` tells which those are), and into experts that expert tensor parallelism splits.
    Stock verl serves the same."""
    paths = (path for _, chunk, _ in model.named() for path, each in chunk.named_modules() if hasattr(each, "to_wrap"))
    found = [c for c in computed if ADAPTED in c] + [path for path in paths if ".experts." in path and _group(True)]
    one = f"Leave its modules out of {MODEL}.lora.target_modules, or, if it is of experts, set {ACTOR}.{ETP}=1"
    for each in found:
        raise ValueError(f"{MODEL}.lora.merge=True: {each}: Megatron-Bridge merges it wrongly. {one}.")


def adapted_weights(model: ModelTensors, names: dict[int, str]) -> Iterator[AdaptedWeight]:
    """The adapted weights of a rank; ``names`` are the global ones of what travels, by place. Raises ValueError for a
    trained parameter that would never arrive, and NotACopyError for an adapter that only the bridge's stream merges."""
    for _, chunk, all_held in model.named():
        held = {each.name: each for each in all_held}
        factors: set[int] = set()
        for path, module in chunk.named_modules():
            if hasattr(module, "to_wrap") and hasattr(module, "adapter"):
                for weight in _of(path, module.adapter, held, names):
                    factors |= {weight.place_a, weight.place_b}
                    yield weight
        trained = [name for name, p in chunk.named_parameters() if p.requires_grad and p.numel()]
        lost = [name for name in trained if held[name].place not in factors and held[name].place not in names]
        if lost:
            remedy = f"Leave their modules out of actor_rollout_ref.model.lora.target_modules, or {TURN_OFF}"
            some = ", ".join(sorted(lost)[:5])
            raise ValueError(f"parameters that are trained, but not exported by Megatron-Bridge: {some}. {remedy}.")


def _of(path: str, adapter: Any, held: dict[str, HeldTensor], names: dict[int, str]) -> Iterator[AdaptedWeight]:
    kind = type(adapter).__name__
    activation = type(getattr(adapter, "activation", None) or torch.nn.Identity()).__name__
    if kind not in _PLAIN or activation != "Identity":  # its factors do not make the delta alone
        raise NotACopyError(f"the adapter of {path!r} ({kind}) is merged by the bridge")
    a, b = (held[f"{path}.adapter.{side}.weight"] for side in ("linear_in", "linear_out"))
    wrapped = f"{path}.to_wrap.weight"
    for each in held.values():
        number = each.name.removeprefix(wrapped)
        if not each.name.startswith(wrapped) or not (number == "" or number.isdigit()) or each.place not in names:
            continue
        name = names[each.place]
        key = name if a.tensor.dim() == 3 else name.partition(".to_wrap.")[0]
        expert = int(number) if a.tensor.dim() == 3 else None
        yield AdaptedWeight(name, f"{key}.A", f"{key}.B", a.place, b.place, expert, adapter, ".experts." in path)


class BridgeAdapter(ServedAdapter):
    """The bridge's own export of an adapter, once per sync: which rows of the small factors belong to which HF module
    is the bridge's knowledge."""

    def __init__(self, engine: Any, timeout_seconds: float) -> None:
        from verl.utils.megatron_peft_utils import build_peft_config_for_vllm

        self._engine = engine
        self._guard = Guard(timeout_seconds)
        self.settings = build_peft_config_for_vllm(engine.model_config.lora)

    def gather(self, run: str) -> Generator[None, None, dict[str, torch.Tensor]]:
        """Raises ValueError: whatever is trained next to the adapter would stay as it is in the engine."""
        for chunk in map(unwrapped, self._engine.module):
            trained = [n for n, p in chunk.named_parameters() if p.requires_grad and p.numel() and ".adapter." not in n]
            rate = getattr(chunk.config, "moe_router_bias_update_rate", 1)
            if rate and getattr(chunk.config, "moe_router_enable_expert_bias", False):
                trained += [name for name, _ in chunk.named_buffers() if name.endswith("expert_bias")]
            refuse_unserved((name, TRAINED) for name in trained)
        yield
        with self._guard.watching(run):
            factors, _ = self._engine.get_per_tensor_param(base_sync_done=True)
            return {f"base_model.model.{name}": tensor.detach() for name, tensor, *_ in factors}
