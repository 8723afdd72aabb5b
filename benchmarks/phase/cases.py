# SPDX-License-Identifier: Apache-2.0
"""What a case of the phase consists of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STRATEGIES = ("fsdp", "fsdp2", "megatron")
BRIDGES = ("megatron-bridge", "mbridge")


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: the case's name in the results.
        model_size: a key of ``models.SHAPES``.
        gpus: ranks, one device each.
        strategy: the trainer's backend.
        rollout_tp: tensor parallel size of the rollout.
        train_tp: tensor parallel size of a Megatron trainer.
        train_pp: pipeline parallel size of a Megatron trainer.
        lora_rank: 0 trains all parameters; otherwise LoRA, merged for the sync.
        steps: training steps, which is also how many syncs are measured.
        bucket_mb: bucket size for both variants.
        device: ``cuda`` or ``cpu``.
        extra: further Hydra overrides, for both variants.
        plugin_extra: further ones for the plugin variant alone.
        train_vpp: model chunks per pipeline stage of a Megatron trainer.
        train_cp: context parallel size of a Megatron trainer.
        train_ep: expert parallel size of a Megatron trainer.
        train_etp: expert tensor parallel size of a Megatron trainer; 0 is verl's default, the tensor parallel size.
        rollout_gpus: devices that the rollout has for itself, beside those of the trainer; 0 where they share.
        bridge: of a Megatron trainer, one of ``BRIDGES``; results that name none are of mbridge.
    """

    name: str
    model_size: str
    gpus: int
    strategy: str
    rollout_tp: int
    train_tp: int
    train_pp: int
    lora_rank: int
    steps: int
    bucket_mb: int
    device: str
    extra: tuple[str, ...] = ()
    plugin_extra: tuple[str, ...] = ()
    train_vpp: int = 1
    train_cp: int = 1
    train_ep: int = 1
    train_etp: int = 0
    bridge: str = "mbridge"
    rollout_gpus: int = 0


@dataclass(frozen=True)
class Paths:
    """Where a run finds its model, prompts and reward."""

    model: Path
    prompts: Path
    reward: Path = Path(__file__).resolve().parent / "reward.py"


def batch_of(device: str) -> int:
    """Prompts per step."""
    return 4 if device == "cpu" else 16


def samples_of(device: str) -> int:
    """Responses per prompt."""
    return 2 if device == "cpu" else 4
