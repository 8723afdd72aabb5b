# SPDX-License-Identifier: Apache-2.0
"""Asks verl's own functions, on tiny modules, whether its FSDP2 can shard an adapted embedding or head.

Where a model does not tie them, verl makes each an FSDP unit, by name, and every ``nn.Embedding`` too. Of an adapted
embedding it shards the outer module before the one inside, which leaves parameters that are cut twice. And it reassigns
a module's ``__class__``, which Python rejects for PEFT's layers because of their abstract base classes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def takes_adapted(name: str) -> bool:
    """Whether the module of that name, ``model.embed_tokens`` or ``lm_head``, can have LoRA factors."""
    from peft import LoraConfig, inject_adapter_in_model

    model, leaf = _model(name)
    inject_adapter_in_model(LoraConfig(r=1, target_modules=[leaf]), model)
    return _shards(model)


def takes_copied(name: str) -> bool:
    """Whether the module of that name can be one of ``modules_to_save``."""
    from peft.utils import ModulesToSaveWrapper

    model, leaf = _model(name)
    model.add_module(leaf, ModulesToSaveWrapper(model.get_submodule(leaf), "default"))
    return _shards(model)


def _model(name: str) -> tuple[torch.nn.Module, str]:
    model: Any = torch.nn.Module()
    model.config = SimpleNamespace(tie_word_embeddings=False)
    leaf = name.rpartition(".")[2]
    model.add_module(leaf, torch.nn.Linear(1, 1) if leaf == "lm_head" else torch.nn.Embedding(1, 1))
    return model, leaf


def _shards(model: torch.nn.Module) -> bool:
    try:
        from verl.utils.fsdp_utils import _select_fsdp2_wrap_targets
    except ImportError:  # another verl, of which this is not known
        return True
    units = _select_fsdp2_wrap_targets(model, [])
    for place, unit in enumerate(units):
        if any(inner in units[place + 1 :] for inner in unit.modules()) or not _accepts_class(unit):
            return False
    return True


def _accepts_class(unit: torch.nn.Module) -> bool:
    """Whether Python lets a module of this class become an FSDP module, as ``fully_shard`` makes it one."""
    from verl.utils import fsdp_utils

    kind = type(unit)
    with fsdp_utils.maybe_patch_fsdp_module(unit):
        module = getattr(fsdp_utils.fully_shard_module, "FSDPModule", torch.distributed.fsdp.FSDPModule)
        try:
            object.__setattr__(object.__new__(kind), "__class__", type("Unit", (module, kind), {}))
        except TypeError:
            return False
    return True
