# SPDX-License-Identifier: Apache-2.0
"""A real SGLang engine fed by verl's real FSDP and Megatron engines: exact after every sync, also after failures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.multiprocessing as mp

import unmeasured
from bare_engine import stories
from bare_engine.scenario import Rank, Setup, run_rank
from megatron_cpu import checkpoints
from megatron_cpu.engines import megatron_environment
from ports import free_port

pytestmark = pytest.mark.slow

THREE, IN_PLACE, TENSOR_PARALLEL = stories.three_syncs, stories.read_in_place, (("tp", 2),)
# Kind of model, strategy, ranks, bytes of a bucket, settings, story; in ``make test`` the first three
CASES: dict[str, tuple[str, str, int, int, tuple[tuple[str, object], ...], Callable[[Rank], None]]] = {
    "fsdp1-tp2": ("llama", "fsdp", 2, 60_000, (("use_orig_params", True),), THREE),
    # read in place: routers that travel in float32, and experts that are views of one parameter
    "moe-in-place": ("qwen3-moe", "fsdp2", 2, 40_000, (), IN_PLACE),
    # what travels as single experts is one parameter in the engine
    "moe-ep2-failing": ("qwen3-moe", "megatron", 2, 60_000, (("ep", 2),), stories.three_syncs_and_failures),
    "fsdp2-tp1": ("qwen2", "fsdp2", 1, 1 << 20, (), THREE),
    "fsdp2-tp2-split-tensors": ("qwen3", "fsdp2", 2, 20_000, (), THREE),
    "tied-fsdp1-tp1": ("qwen2-tied", "fsdp", 1, 1 << 20, (), THREE),
    "megatron-tp1": ("qwen3", "megatron", 1, 1 << 20, (), THREE),
    "megatron-tp2": ("qwen2", "megatron", 2, 20_000, TENSOR_PARALLEL, THREE),
    "fsdp2-in-place": ("qwen2", "fsdp2", 2, 40_000, (), IN_PLACE),
    "megatron-in-place": ("qwen2", "megatron", 2, 40_000, TENSOR_PARALLEL, IN_PLACE),
    # of latent attention's kv_b_proj the engine keeps two products
    "deepseek-ep2": ("deepseek", "megatron", 2, 60_000, (("ep", 2),), THREE),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extended if at > 2 else ()) for at, name in enumerate(CASES)]
)
def test_engine_equals_disk_load(name: str, tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    kind, strategy, world, bucket_bytes, settings, story = CASES[name]
    if kind in ("qwen3-moe", "deepseek"):
        path = checkpoints.write(kind, tmp_path / "model", **checkpoints.FOR_SGLANG)
        bound = (
            0.15  # SGLang multiplies latent attention in another order; a wrong rotary embedding is off by up to 0.5
        )
    else:
        path, bound = tiny_model(kind), 0.06
    setup = Setup(path, strategy, world, bucket_bytes, settings, bound)
    megatron = megatron_environment() if strategy == "megatron" else nullcontext()
    with megatron, unmeasured.children():
        mp.spawn(run_rank, args=(setup, str(tmp_path), free_port(), story), nprocs=world)
