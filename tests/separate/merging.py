# SPDX-License-Identifier: Apache-2.0
"""Trainer ranks whose LoRA adapter is merged on its way to separate engines, and rollout ranks that judge what came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bare_engine import trainer
from separate.rollouts import Rollout
from separate.serving import RANK, SCALING, TARGETS, LoRATrainer

TINY = 4e-6  # see tests/contract/test_lora_merge.py, which judges by the same measure


class MergedLoRATrainer(LoRATrainer):
    """A rank of verl's own FSDP2 engine whose adapter is merged on the way."""

    def _build(self, model: str) -> object:
        lora = {"lora_rank": RANK, "lora_alpha": RANK * SCALING, "target_modules": TARGETS, "lora": {"merge": True}}
        return trainer.build(model, "fsdp2", lora)

    def sync(self, version: int) -> dict[str, Any]:
        """Sends, which changes neither base nor adapter; returns the report."""
        before = trainer.local_state(self.trainer)
        report = super().sync(version)
        assert all(map(torch.equal, before, trainer.local_state(self.trainer))), "the sync changed the trainer"
        return report


class JudgingRollout(Rollout):
    """A rollout rank whose engine is compared with a checkpoint merged by hand."""

    def judged(self, merged: Path, base: Path, folder: Path) -> tuple[list[str], list[str], float]:
        """The engine then holds the base.

        Returns:
            What is not, within a unit in the last place, as SGLang loads it from a checkpoint merged by hand; what is
            not, bit for bit, as in the base; and how much of all elements is bit for bit as merged by hand.
        """
        synced, by_hand = self.held(merged, folder)
        _, plain = self.held(base, folder)
        off, adapted, equal, total = [], [], 0, 0
        for ours, theirs, unmerged in zip(synced, by_hand, plain, strict=True):
            assert ours.keys() == theirs.keys() == unmerged.keys()
            off += [name for name in ours if not _within_one_ulp(ours[name], theirs[name])]
            adapted += [name for name in ours if not torch.equal(ours[name], unmerged[name])]
            equal += sum(int((ours[name] == theirs[name]).sum()) for name in ours)
            total += sum(tensor.numel() for tensor in ours.values())
        return off, adapted, equal / total


def _within_one_ulp(got: torch.Tensor, expected: torch.Tensor) -> bool:
    ulp = torch.nextafter(expected.abs(), torch.tensor(torch.inf, dtype=expected.dtype)) - expected.abs()
    return got.dtype == expected.dtype and bool(((got - expected).abs() <= ulp.clamp(min=TINY)).all())
