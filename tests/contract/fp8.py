# SPDX-License-Identifier: Apache-2.0
"""Whole checkpoints in fp8, by the formula of verl's kernel, and what a trainer's ranks make of their shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from contract.reading import Reader, State, check_same

Blocks = Mapping[str, tuple[int, int]]


def quantized(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in fp8 and its scales, of blocks of so many rows and columns."""
    (rows, columns), (high, wide) = weight.shape, block
    whole = torch.nn.functional.pad(weight.float(), (0, -columns % wide, 0, -rows % high))
    parts = whole.view(whole.shape[0] // high, high, whole.shape[1] // wide, wide)
    scales = parts.abs().amax((1, 3)).clamp(min=1e-10) / torch.tensor([448.0])
    values = (parts * (1.0 / scales)[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.view(whole.shape)[:rows, :columns].contiguous(), scales


def checkpoint(state: State, blocks: Blocks) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state, those with blocks in fp8; what travels in bf16 is cast to it first."""
    for name, tensor in state.items():
        if name in blocks:
            values, scales = quantized(tensor.to(torch.bfloat16), blocks[name])
            yield name, values
            yield f"{name}_scale_inv", scales
        else:
            yield name, tensor


def projections(state: State, block: tuple[int, int]) -> Blocks:
    """The weights that an engine keeps in fp8, experts among them."""
    return {name: block for name, tensor in state.items() if tensor.dim() == 2 and name.endswith("_proj.weight")}


def check_quantized(manager: Any, expected: State, blocks: Blocks, bucket_bytes: int, sharded: bool) -> Reader:
    """Syncs what a manager's trainer holds in fp8: it must be that of the whole tensors. Collective."""
    manager.trainer.policy.blocks.update(blocks)
    reader = Reader(manager.open_source())
    got = reader.sync(bucket_bytes, sharded)
    bits = {name: t.view(torch.uint8) if t.dtype.itemsize == 1 else t for name, t in got.items()}
    wanted = {n: t.view(torch.uint8) if t.dtype.itemsize == 1 else t for n, t in checkpoint(expected, blocks)}
    check_same(bits, wanted)
    return reader
