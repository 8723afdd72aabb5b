# SPDX-License-Identifier: Apache-2.0
"""One bit flips in a sync that reads the trainer's parameters where they lie: in the trainer's memory between its hash
and the engine's read, and in the engine's own parameter behind the copy. Of staged syncs: ``contract/test_flips.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from bare_engine import trainer
from bare_engine.scenario import Rank
from unseen import reads_unseen
from verl_sync_plugin.copies.packing import Found
from verl_sync_plugin.layout.tensors import Shard

READ, HELD = "changed on the way to the engine", "do not hold what was sent of"
LAYER = "model.layers.1."
# Per flip: a parameter of the engine; an HF tensor of the trainer, in whose storage the bit flips; what both belong to
VICTIMS = (
    (f"{LAYER}self_attn.qkv_proj.weight", f"{LAYER}self_attn.q_proj.weight", f"{LAYER}self_attn."),
    (f"{LAYER}mlp.experts.w13_weight", f"{LAYER}mlp.experts.2.down_proj.weight", f"{LAYER}mlp.experts."),
)


def are_found(member: Rank) -> None:
    """Each in a direct sync, by the hash or by the comparison of the destination alone, or by neither where both are
    off; what is found fails the sync on all ranks, and the next one is exact."""
    flips, held = Flips(member), {name for shard in _shards(member) for name in _names(shard)}
    before = flips.cadence._verify
    for parameter, tensor, part in VICTIMS:
        if tensor in held:  # there are experts
            flips.behind_the_copy(parameter, part)
            flips.between_hash_and_read(tensor)
    flips.cadence._verify = before


class Flips:
    """In one member's syncs, all of them direct."""

    def __init__(self, member: Rank) -> None:
        self.member, self.cadence = member, member.manager.cadence
        self._last, self._found = member.rank == dist.get_world_size() - 1, 0

    def behind_the_copy(self, parameter: str, part: str) -> None:
        """In the engine's parameter: no hash of what was read tells of it."""
        for verify, expected in (("never", ""), ("always", HELD)):
            self.cadence._verify = verify
            if self.member.engine is not None:
                self.member.engine.spoil_next(parameter)
            weights = trainer.local_state(self.member.trainer)
            text = self._ends_with(expected, part)
            assert all(map(torch.equal, weights, trainer.local_state(self.member.trainer))), "the trainer was changed"
            self._recovers(text)

    def between_hash_and_read(self, victim: str) -> None:
        """In the trainer's memory that the engine has mapped: the hash tells, whatever ``verify`` says."""
        names = {name for shard in _shards(self.member) if victim in _names(shard) for name in _names(shard)}
        for hashes, verify, expected in (
            (True, "never", READ),
            (True, "always", READ),
            (False, "always", HELD),
            (False, "never", ""),
        ):
            self.cadence._verify = verify
            unseen = nullcontext() if hashes else reads_unseen()
            with unseen, self._changing(victim):
                text = self._ends_with(expected, *names)
            self._recovers(text)

    @contextmanager
    def _changing(self, victim: str) -> Iterator[None]:
        """The last rank's next hashing is followed by a flip, which is taken back in the end."""
        sender = self.member.manager.sender
        honest, flipped = sender.read, list[torch.Tensor]()

        def read(shards: list[Shard], found: Found) -> None:
            honest(shards, found)
            if self._last:
                runs = [shard.local() for shard in shards if victim in _names(shard)]  # of other ranks' tensors empty
                run = next(run for run in runs if len(run) > 7)
                flipped.append(run[7:8].view(torch.uint8)[-2:-1])  # of fp32 the part that is left in bf16
                flipped[0].bitwise_xor_(64)

        sender.read = read  # type: ignore[method-assign]
        try:
            yield
        finally:
            del sender.read
            for byte in flipped:
                byte.bitwise_xor_(64)
        assert len(flipped) == self._last, "nothing was flipped"

    def _ends_with(self, expected: str, *names: str) -> str:
        """The error of a sync that fails alike on all ranks; empty of one that does not, since nobody looks."""
        if not expected:
            self.member.sync(20)
            assert self.member.manager.report.direct_bytes > 0
            return ""
        text = self.member.failing(21)
        assert self.member.manager.report.delivery == "direct"
        assert expected in text and any(name in text for name in names), (expected, names, text)
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, text)
        assert len(set(texts)) == 1, texts
        return text

    def _recovers(self, text: str) -> None:
        """The next sync after a failed one, of other weights: read in place, verified and exact."""
        if text:
            self.cadence._verify = "always"
            # back and forth: ever larger weights would make their rounding show in the tokens' probabilities
            trainer.perturb(self.member.trainer, self._found // 2, scale=-0.05 if self._found % 2 else 0.05)
            self._found += 1
            self.member.sync(22)
            report = self.member.manager.report
            assert report.direct_bytes > 0 and report.verified_tensors > 10, report
            self.member.check_exact(f"flips{self._found}")


def _shards(member: Rank) -> list[Shard]:
    source = member.manager.source
    assert source is not None
    try:
        return source.shards()
    finally:
        source.release()


def _names(shard: Shard) -> list[str]:
    return [view.name for view in shard.base.views]
