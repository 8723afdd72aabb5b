# SPDX-License-Identifier: Apache-2.0
"""One bit flips on the way of a weight: which of the hashes and of the comparison of the destination finds it, where.

As in ``test_destination.py``: SGLang's own model classes, two tensor-parallel ranks, the real packer and load.
``staging`` is the bucket between its packing and its load, ``passage`` the copy itself, whose reader has hashed what it
was to copy, and ``destination`` the engine's parameter behind all copies. On the network: ``several_hosts.py``; in a
running engine: ``tests/bare_engine``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from contract import sglang_models as models
from contract.wire import Wire
from ports import free_port
from unseen import reads_unseen
from verl_sync_plugin.copies.copier import Memory, _PlainPrepared
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.load_map import owners_of, read_parts
from verl_sync_plugin.layout.tensors import hulls_of, numbers_of
from verl_sync_plugin.verify import FIRST_SYNCS, Cadence

pytestmark = pytest.mark.slow
WHERE = ("staging", "passage", "destination")
READ, HELD = "changed on the way to the engine", "do not hold what was sent of"
LAYER = "model.layers.1."
# Parts of fused parameters, cut by columns and by rows, the vocabulary, what every rank holds whole; tied ends; experts
VICTIMS = {
    "qwen2": (
        *(f"{LAYER}self_attn.{part}_proj.weight" for part in "qkvo"),
        f"{LAYER}self_attn.k_proj.bias",
        *(f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        "lm_head.weight",
        "model.norm.weight",
    ),
    "qwen2-tied": ("model.embed_tokens.weight",),
    "qwen3-moe": (
        *(f"{LAYER}mlp.experts.5.{part}_proj.weight" for part in ("gate", "up", "down")),
        f"{LAYER}mlp.gate.weight",
    ),
}
Spoil = Callable[[torch.Tensor], None]


@contextmanager
def a_flip(wire: Wire, where: str, victim: str) -> Iterator[tuple[Spoil, Callable[[], None]]]:
    """During the next sync; what ``Wire.sync`` takes for it. In passage and destination of the last rank only."""
    (bucket,) = wire.plan.buckets
    owners = owners_of([bucket.entries])
    owner = owners[numbers_of([bucket.entries])[victim]]
    parts = read_parts(wire.load.map, [bucket.entries], owners)
    groups = {group for group, (number, _) in enumerate(parts) if number == owner}
    place = next(hull.first for hull in hulls_of(bucket.entries) if victim in hull.names) + 7
    held: list[torch.Tensor] = []  # bytes of the victim in the engine's parameters
    honest, last = _PlainPrepared.run, dist.get_rank() == dist.get_world_size() - 1

    def flip(memory: torch.Tensor, at: int) -> None:
        memory[at] ^= 2

    def run(prepared: Any, memory: Memory, sums: torch.Tensor, copy: bool = True, hashed: bool = True) -> None:
        honest(prepared, memory, sums, copy, hashed)
        for block in prepared._blocks if copy else ():
            if block.group in groups and not held:
                flat, start = prepared._targets.find(block.target)
                held.append(flat[start : start + 8])
                if where == "passage" and last:
                    flip(held[0], 7)

    def spoil(memory: torch.Tensor) -> None:
        if where == "staging":
            flip(memory, place)

    def behind() -> None:
        if where == "destination" and last:
            flip(held[0], 7)

    with mock.patch.object(_PlainPrepared, "run", run):
        yield spoil, behind


def found(wire: Wire, weights: models.Weights, where: str, victim: str, hashes: bool, verified: bool) -> str:
    """By which of the two a flip was found; empty if nobody noticed it."""
    wire.verified = verified
    unseen = nullcontext() if hashes else reads_unseen()
    try:
        with unseen, a_flip(wire, where, victim) as (spoil, behind):
            wire.sync(weights, spoil, behind)
    except SyncError as error:
        text = str(error)
        assert victim in text, text
        return "read" if READ in text else "held" if HELD in text else text
    return ""


def every_flip_is_found(kind: str, wire: Wire) -> None:
    """With the comparison alone wherever it is; with neither of the two nowhere, so it is the comparison that did."""
    for seed, victim in enumerate(VICTIMS[kind], start=3):
        weights = models.weights_of(kind, seed)
        for where in WHERE:
            packed = where == "staging"
            for hashes, verified, expected in (
                (False, True, "held"),
                (False, False, ""),
                (True, False, "read" if packed else ""),
                (True, True, "read" if packed else "held"),
            ):
                seen = found(wire, weights, where, victim, hashes, verified)
                assert seen == expected, (victim, where, hashes, verified, seen)
        wire.verified = True
        wire.sync(models.weights_of(kind, seed))


def what_first_finds(kind: str, wire: Wire) -> None:
    """All of it in as many syncs as are verified; later what is read otherwise than it was packed."""
    cadence, victim = Cadence("first"), VICTIMS[kind][0]
    for number in range(1, FIRST_SYNCS + 2):
        weights, verified = models.weights_of(kind, number), cadence.due(wire.plan.digest)
        assert verified is (number <= FIRST_SYNCS)
        seen = [found(wire, weights, where, victim, hashes=True, verified=verified) for where in WHERE]
        assert seen == (["read", "held", "held"] if verified else ["read", "", ""]), (number, seen)
        assert cadence.due(wire.plan.digest) is verified, "a sync that failed does not count"
        wire.verified = verified
        wire.sync(weights)
        cadence.note(wire.plan.digest)


def run_rank(rank: int, world: int, folder: str, port: int) -> None:
    """One tensor-parallel rank; entry of a spawned process."""
    torch.set_num_threads(1)
    with torch.no_grad():
        for kind in VICTIMS:
            config = models.start(Path(folder), kind, rank, world, port)
            wire = Wire(models.build(config), models.weights_of(kind, 0), 1, 1 << 30)
            wire.sync(models.weights_of(kind, 1))
            every_flip_is_found(kind, wire)
            what_first_finds(kind, wire)


def test_one_flipped_bit(tmp_path: Path) -> None:
    port = free_port()
    mp.spawn(run_rank, args=(2, str(tmp_path), port), nprocs=2)
