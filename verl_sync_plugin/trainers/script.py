# SPDX-License-Identifier: Apache-2.0
"""The source of a script: an FSDP2, FSDP1, DDP or plain module, a state dict, or one of verl's training engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from verl_sync_plugin.config.settings import TRAINERS
from verl_sync_plugin.layout.tensors import Shard
from verl_sync_plugin.trainers.base import ParameterSource, TrainerBackend
from verl_sync_plugin.trainers.fsdp import FSDP1Trainer, FSDP2Trainer
from verl_sync_plugin.trainers.fsdp2 import State, StateDictSource, cut, local
from verl_sync_plugin.trainers.naming import Naming, tied_head, verl_rewrite
from verl_sync_plugin.transport.agreement import Agreement

Trained = torch.nn.Module | Mapping[str, torch.Tensor]
STATE_DICT = "state dict"
KINDS = "an FSDP2, FSDP1, DDP or plain module of transformers, a state dict, or one of verl's training engines"


class Given:
    """Holds what the next sync reads, in the place of verl's training engine; ``config`` is that of the served model,
    as in ``config.json``. ``source`` is what the script gave last, and ``kind`` its kind: a strategy of verl's
    (``fsdp2`` for DDP and plain modules, too), or the name above."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.source: Any = None
        self.kind = ""
        self._modules: list[torch.nn.Module] = []

    def take(self, source: Any) -> bool:
        """Notes what a sync is to read; True if it is another module or kind than before, or has other modules in it.
        Raises TypeError, or ValueError for a module, where it cannot be read."""
        source = getattr(source, "_modules", {}).get("_orig_mod", source)  # what torch.compile has wrapped
        modules = list(source.modules()) if isinstance(source, torch.nn.Module) else []
        if source is self.source and modules == self._modules and not isinstance(source, Mapping):
            return False
        before, self.kind = self.kind, kind_of(source)
        self.source, self._modules = source, modules
        return self.kind != before or not isinstance(source, Mapping)

    def let_go(self) -> None:
        """Drops a state dict, which the script may have made for this sync alone."""
        if isinstance(self.source, Mapping):
            self.source = None


def kind_of(source: Any) -> str:
    """The kind of what a script trains; see ``Given`` for the kinds and ``Given.take`` for the errors."""
    strategy = getattr(getattr(source, "engine_config", None), "strategy", None)
    if strategy is not None:
        if strategy not in TRAINERS:
            raise ValueError(f"the training engine's strategy {strategy!r}: use one of {', '.join(TRAINERS)}.")
        return str(strategy)
    if isinstance(source, Mapping):
        if not source or not all(isinstance(tensor, torch.Tensor) for tensor in source.values()):
            raise TypeError("the state dict is empty, or holds something else than tensors. Give names and tensors.")
        refuse_meshes(source.items())
        return STATE_DICT
    if not isinstance(source, torch.nn.Module):
        raise TypeError(f"a {type(source).__name__} cannot be synced. Give {KINDS}.")
    if isinstance(source, FullyShardedDataParallel):
        refuse_meshes(source.named_parameters(), 0)
        return "fsdp"
    if inner := [name for name, module in source.named_modules() if isinstance(module, FullyShardedDataParallel)]:
        raise ValueError(f"module {inner[0]!r} is wrapped by FSDP1 and the root is not. Wrap the root, too.")
    if not hasattr(model := unwrapped(source), "config"):
        raise ValueError(
            f"a {type(model).__name__} has no config, which says how a checkpoint names its tensors. Give "
            "a model of transformers, or a state dict with the names of a checkpoint."
        )
    refuse_meshes(source.named_parameters())
    return "fsdp2"


def refuse_meshes(named: Iterable[tuple[str, torch.Tensor]], most: int = 1) -> None:
    """Raises ValueError, with the remedy, for DTensors that are cut over more meshes; FSDP1 has one of its own."""
    meshes = {tensor.device_mesh: name for name, tensor in named if isinstance(tensor, DTensor) and cut(tensor)}
    if len(meshes) > most:
        raise ValueError(
            f"parameters {', '.join(meshes.values())} are cut over different meshes, or one that is not FSDP1's; a "
            "sync supports one. Give a state dict in which full_tensor() has made those of the other meshes whole."
        )


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside DDP."""
    return module.module if isinstance(module, DistributedDataParallel) else module


class MadeForOneSync(StateDictSource):
    """A state dict whose tensors the script may have made for this sync alone, also a tied end once for each name."""

    _left_out: frozenset[str] = frozenset()

    @property
    def readable_in_place(self) -> bool:
        """False: the engine maps what it reads so until the next sync, and freed memory would not come back."""
        return False

    def agree_on_layout(self, agreement: Agreement) -> ParameterSource:
        """The ranks find out together whether the head that the config ties differs from the embedding on any."""
        if tied := self._naming.unsaved:
            differ = agreement.any("comparing tied ends", lambda: _differ(self._given(), tied))
            self._left_out = frozenset() if differ else tied
        return self

    def shards(self) -> list[Shard]:
        return [each for each in super().shards() if not {view.name for view in each.base.views} <= self._left_out]


def _differ(state: State, tied: frozenset[str]) -> bool:
    """True if a tied end holds other bytes than every other tensor."""
    others = [tensor for name, tensor in state.items() if name not in tied]
    return not all(any(_same(state[name], other) for other in others) for name in tied if name in state)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.equal(*(local(each).detach().contiguous().view(torch.uint8) for each in (one, other)))


class ScriptTrainer(TrainerBackend):
    """Opens ``Given`` with the backend of the engine of verl that would hold it. Merges adapters of PEFT."""

    engine: Given

    def open_source(self) -> ParameterSource:
        given = self.engine
        if isinstance(given.source, Mapping):
            naming = Naming(self.policy, verl_rewrite(given.config.get("model_type")), unsaved=tied_head(given.config))
            return MadeForOneSync(lambda: given.source, naming)
        engine: Any = given.source
        if isinstance(engine, torch.nn.Module):
            engine = SimpleNamespace(module=unwrapped(engine), model_config=SimpleNamespace(lora={"merge": True}))
        backend: type[TrainerBackend] = FSDP1Trainer if given.kind == "fsdp" else FSDP2Trainer
        if given.kind == "megatron":
            from verl_sync_plugin.trainers.megatron.trainer import MegatronTrainer as backend
        inner = backend(engine, self.config, self.device, self.rollout_dtype)
        inner.policy = self.policy
        if inner.serves_adapter:
            raise ValueError("model.lora.merge=False: a script's engine serves merged weights. Set it to True.")
        return inner.open_source()

    @property
    def name(self) -> str:
        return "script"

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(self.engine.config.get("architectures") or ())
