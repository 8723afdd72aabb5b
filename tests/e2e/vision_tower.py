# SPDX-License-Identifier: Apache-2.0
"""Imported by verl in every process of a test run: actor workers say after every step what of the model has changed.

With ``SYNC_TEST_FREEZE=1`` the vision tower is frozen, which ``actor.freeze_vision_tower`` asks for in vain: verl 0.9.1
does not read it.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

import torch
from wrapt import register_post_import_hook


def _parts(module: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """Copies of this rank's parameters, of the tower and of everything else."""
    found: dict[str, list[torch.Tensor]] = {"tower": [], "language": []}
    for name, parameter in module.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[operator]
        found["tower" if "visual." in name else "language"].append(local.detach().clone())
    return found


def _watch(transformer_impl: ModuleType) -> None:
    engine: Any = transformer_impl.FSDPEngine
    build, step = engine._build_fsdp_module, engine.optimizer_step

    @functools.wraps(build)
    def frozen_build(self: Any, module: Any) -> Any:
        if os.environ.get("SYNC_TEST_FREEZE") == "1":
            module.model.visual.requires_grad_(False)
        return build(self, module)

    @functools.wraps(step)
    def watched_step(self: Any) -> Any:
        before = _parts(self.module)
        result = step(self)
        after = _parts(self.module)
        for part, tensors in before.items():
            changed = sum(not torch.equal(old, new) for old, new in zip(tensors, after[part], strict=True))
            print(f"[e2e] {part}: {changed} of {len(tensors)} parameters changed", flush=True)
        return result

    engine._build_fsdp_module, engine.optimizer_step = frozen_build, watched_step


register_post_import_hook(_watch, "verl.workers.engine.fsdp.transformer_impl")
