# SPDX-License-Identifier: Apache-2.0
"""What lies in the parameters of SGLang's own model classes after a sync is compared with what was sent.

Packer and load are the real ones without a channel, as in ``test_loads.py``; each tensor-parallel rank
is a process. A flipped bit must be found wherever it is, and nothing may be reported where none is flipped.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from contract import sglang_models as models
from contract.wire import Wire
from ports import free_port
from unseen import reads_unseen
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.verify import DERIVED

pytestmark = pytest.mark.slow
HELD = "do not hold what was sent of"
# What cannot be compared of each model: DeepSeek's attention has weights of its own, derived from others
LEFT_OUT = {"deepseek-v2": {DERIVED: "is computed"}, "deepseek-v3": {DERIVED: "is computed"}}


def everyone_raises(wire: Wire, behind: Any) -> str:
    """The error of a proof that must fail, the same on all ranks."""
    with pytest.raises(SyncError) as caught:
        behind()
        wire.compare()
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1, texts
    return str(caught.value)


def three_syncs_are_proven(kind: str, config: Any) -> Wire:
    """Whatever the cuts; what cannot be compared is named."""
    for ranks, bucket_bytes, sharded in ((1, 1 << 30, False), (3, 20_000, True), (2, 1 << 16, False)):
        wire = Wire(models.build(config), models.weights_of(kind, 0), ranks, bucket_bytes, sharded)
        for seed in (1, 2, 3):
            wire.sync(models.weights_of(kind, seed))
        expected = LEFT_OUT.get(kind, {})
        assert wire.comparison.left_out == expected, wire.comparison.left_out
        assert len(wire.comparison.compared) == len(wire.plan.bases) - len(expected.keys() - {DERIVED})
    return wire


def every_flipped_bit_is_found(kind: str, wire: Wire) -> None:
    """One bit anywhere in any parameter, on one rank: padding of the vocabulary, fused parts, replicated ones."""
    generator = random.Random(kind)
    found = 0
    for parameter in wire.model.parameters():
        flat = parameter.data.view(-1).view(torch.uint8)
        for at in {0, flat.numel() - 1, generator.randrange(flat.numel())}:
            bit, rank = 1 << generator.randrange(8), generator.randrange(dist.get_world_size())

            def flip(flat: torch.Tensor = flat, at: int = at, bit: int = bit, rank: int = rank) -> None:
                if dist.get_rank() == rank:
                    flat[at] ^= bit

            text = everyone_raises(wire, flip)
            assert HELD in text or "hold what no load puts there" in text, text
            flip()
            found += 1
    assert found > 30
    wire.compare()


def bytes_that_change_on_their_way_are_found_at_its_end(kind: str, config: Any) -> None:
    """Also with nobody looking at what the engine reads."""
    wire = Wire(models.build(config), models.weights_of(kind, 0), 2, 1 << 16)

    def flip(memory: torch.Tensor) -> None:
        memory[4097] ^= 4

    with reads_unseen():
        for seed in (1, 3):
            with pytest.raises(SyncError, match=HELD):
                wire.sync(models.weights_of(kind, seed), flip)
            wire.sync(models.weights_of(kind, seed + 1))


def a_bit_flipped_behind_the_copies_is_found_where_syncs_are_verified(kind: str, config: Any) -> None:
    """And the next sync is right again; without the proof nobody notices."""
    model = models.build(config)
    wire = Wire(model, models.weights_of(kind, 0), 2, 1 << 16)
    norm = model.model.layers[1].mlp.down_proj.weight

    def flip() -> None:
        norm.data.view(torch.uint8)[3, 5] ^= 64

    for seed in (1, 3):
        with pytest.raises(SyncError, match=rf"{HELD} model\.layers\.1\.mlp\.down_proj\.weight"):
            wire.sync(models.weights_of(kind, seed), behind=flip)
        wire.sync(models.weights_of(kind, seed + 1))
    wire.verified = False
    wire.sync(models.weights_of(kind, 5), behind=flip)


def a_router_bias_kept_in_fp32_is_compared(kind: str, config: Any) -> None:
    """Sent as bfloat16 and kept wider: the lower half of an element, which no bfloat16 has, is looked at, too."""
    narrow = [(n, t.to(torch.bfloat16)) for n, t in models.weights_of(kind, 1)]
    wire = Wire(models.build(config), narrow, 2, 1 << 16)
    wire.sync(narrow)
    parameter = dict(wire.model.named_parameters())["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert parameter.dtype == torch.float32 and set(wire.comparison.left_out) == set(LEFT_OUT[kind])
    for at in (1, 3):  # little endian: lower half, upper half
        with pytest.raises((SyncError, ValueError)):
            parameter.data.view(torch.uint8)[at] ^= 1
            wire.compare()
        parameter.data.view(torch.uint8)[at] ^= 1
    wire.compare()


def run_rank(rank: int, world: int, folder: str, port: int) -> None:
    """One tensor-parallel rank; entry of a spawned process."""
    torch.set_num_threads(1)
    with torch.no_grad():
        for kind in models.CONFIGS:
            wire = three_syncs_are_proven(kind, models.start(Path(folder), kind, rank, world, port))
            every_flipped_bit_is_found(kind, wire)
        a_router_bias_kept_in_fp32_is_compared(
            "deepseek-v3", models.start(Path(folder), "deepseek-v3", rank, world, port)
        )
        config = models.start(Path(folder), "qwen2", rank, world, port)
        for story in (
            bytes_that_change_on_their_way_are_found_at_its_end,
            a_bit_flipped_behind_the_copies_is_found_where_syncs_are_verified,
        ):
            story("qwen2", config)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.extended), 2])
def test_every_model(world: int, tmp_path: Path) -> None:
    port = free_port()
    mp.spawn(run_rank, args=(world, str(tmp_path), port), nprocs=world)
