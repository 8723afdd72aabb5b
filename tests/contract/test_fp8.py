# SPDX-License-Identifier: Apache-2.0
"""fp8 rollouts: what a sync leaves in SGLang's fp8 modules is what SGLang's own load makes of the whole checkpoint,
quantized by verl's formula. Blocks are of 16 x 16, for the models are tiny."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import run_fresh

from contract.families import FAMILIES, Family
from contract.test_families import outcome
from verl_sync_plugin.trainers.base import WirePolicy

pytestmark = pytest.mark.slow
SIZE = 16
CONFIG = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [SIZE, SIZE]}
ARGUMENTS = {"quantization": "fp8", "json_model_override_args": json.dumps({"quantization_config": CONFIG})}
LOADERS = (
    ".layers.parameter", ".layers.linear", ".vocab_parallel_embedding", ".fused_moe_triton.layer",
    ".quantization.unquant", ".quantization.fp8",
)  # fmt: skip


def load_as_on_a_gpu() -> None:
    """On a CPU SGLang pads what it loads, and packs fp8 weights for AMX."""
    import sglang.srt.layers.quantization.fp8  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.srt.") and (name.endswith(LOADERS) or ".models." in name):
            if getattr(module, "_is_cpu", False):
                module._is_cpu = False  # type: ignore[attr-defined]


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole matrix in fp8 and its scales, by the formula of verl's kernel."""
    rows, columns = weight.shape
    whole = torch.nn.functional.pad(weight.to(torch.bfloat16).float(), (0, -columns % SIZE, 0, -rows % SIZE))
    blocks = whole.view(whole.shape[0] // SIZE, SIZE, whole.shape[1] // SIZE, SIZE)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-10) / torch.tensor([448.0])
    values = (blocks * (1.0 / scales)[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.view(whole.shape)[:rows, :columns].contiguous(), scales


def checkpoint(policy: WirePolicy, saved: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in saved.items():
        if name in policy.blocks:
            values, scales = quantized(tensor)
            yield name, values
            yield f"{name}_scale_inv", scales
        else:
            yield name, tensor


def whole_blocks(family: Family) -> Family:
    """The family with experts that two ranks share out in whole blocks, as SGLang insists."""
    sizes = {key: 64 for key in ("moe_intermediate_size", "shared_expert_intermediate_size") if key in family.config}
    return replace(family, config={**family.config, **sizes})


def outcomes(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    load_as_on_a_gpu()
    found: dict[str, Any] = {}
    for number, name in enumerate(names):
        try:
            change = lambda policy: partial(checkpoint, policy)  # noqa: E731
            found[name] = outcome(whole_blocks(FAMILIES[name]), folder / str(number), 0, ARGUMENTS, change)
        except Exception as error:
            import traceback; traceback.print_exc()
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("ranks", (1, 2))
def test_some(ranks: int, tmp_path: Path) -> None:
    import os
    names = tuple(os.environ.get("FAM", "Qwen2").split(";"))
    first, *others = run_fresh(ranks, outcomes, tmp_path, names, timeout=1000.0)
    for k, v in first.items(): print(k, "|", v)
    assert 0
