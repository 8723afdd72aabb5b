# SPDX-License-Identifier: Apache-2.0
"""Whether the engine read what the trainer sent: one hash per tensor, summed over all ranks on both sides.

The hash is linear (``copies/plain.py``), so hashes of parts add up. The trainer ranks together hash every byte as often
as it is sent, the engine ranks as often as it is read: once per tensor-parallel group for what they share out, once per
rank for what they all hold. One sum over all ranks then compares everything.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.copies.hulls import numbers_of
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import Committed, Readings

NAMED = 5  # tensors in a message


class HashCheck:
    """The trainer's comparison of hashes; keeps what the engine ranks read of each tensor, which changes only with the
    plan.

    Attributes:
        times_read: how many engine ranks read each byte of each tensor: int64 of shape ``(tensors,)``; -1 where that is
            uneven.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._readings: Readings = ()
        self._learned = False
        self._digest = ""  # of the plan that was learned
        self._whole: tuple[int, ...] = ()
        self._names: list[str] = []
        self._times_sent = torch.zeros(0, dtype=torch.int64)
        self.times_read = torch.zeros(0, dtype=torch.int64)

    def whole(self, plan: Plan) -> tuple[int, ...]:
        """Tensors that the engine ranks are to hash whole, because they read some bytes more often than others."""
        return self._whole if plan.digest == self._digest else ()

    def knows(self, plan: Plan) -> bool:
        """Whether what the engine ranks read of a plan's tensors is known. An engine may have told another trainer."""
        return self._learned and plan.digest == self._digest

    def note(self, committed: Committed) -> bool:
        """Keeps what an engine rank says it reads; returns whether ``learn`` is needed."""
        if committed.readings is not None:  # told once only, so kept even if this sync fails
            self._readings, self._learned = committed.readings, False
        return not self._learned

    def forget(self) -> None:
        """Behind a sync that was given up: has the engine ranks tell again what they read."""
        self._learned = False

    def learn(self, plan: Plan, sent_by: int | None = None) -> None:
        """Collective: exchanges what the engine ranks read. What they read unevenly cannot be summed up; it is not
        compared in this sync, and hashed whole from the next one on.

        Args:
            plan: of this sync.
            sent_by: how many ranks send each byte; ``None`` for what the plan says.
        """
        everywhere = self._agreement.gather("exchanging what the engine reads", self._readings)
        self._names = list(numbers_of(bucket.entries for bucket in plan.buckets))
        planned = times_sent(plan, len(self._agreement.ranks.trainers))
        self._times_sent = planned if sent_by is None else torch.full_like(planned, sent_by)
        self.times_read = times_read(len(self._names), everywhere)
        uneven = (self.times_read < 0).nonzero().flatten().tolist()
        self._whole, self._digest, self._learned = (*self.whole(plan), *uneven), plan.digest, True

    def compare(self, sums: torch.Tensor) -> None:
        """Collective: compares all hashes of a sync.

        Args:
            sums: the result of ``paired`` on this rank.

        Raises:
            SyncError: bytes changed on the way; names the tensors, the same text on every rank.
        """
        total = self._agreement.vote("ending the engine's update and comparing hashes", sums).reshape(2, -1)
        wrong = (total[0] * self.times_read != total[1] * self._times_sent) & (self.times_read >= 0)
        if wrong.any():
            names = [self._names[number] for number in wrong.nonzero().flatten().tolist()]
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            raise SyncError(
                f"weight sync failed: the bytes of {', '.join(names[:NAMED])}{more} changed on the way to the engine. "
                "The memory between trainer and engine is not reliable, or something overwrote a bucket in use, or "
                "replicas of the trainer differ. Trainer weights are unchanged. "
                f"Look at the machine's log (ECC, Xid); {TURN_OFF} to compare."
            )


def paired(sent: torch.Tensor, committed: Committed | None) -> torch.Tensor:
    """What a rank sent and what the engine rank beside it read: int64 of shape ``(2, tensors)``.

    Args:
        sent: zeros for a rank that sends nothing.
        committed: ``None`` where there is no engine rank.

    Raises:
        ValueError: the engine hashed another number of tensors.
    """
    if committed is None:
        return torch.stack([sent, torch.zeros_like(sent)])
    received = torch.from_numpy(np.frombuffer(committed.sums, dtype="<i8").astype(np.int64))
    if received.shape != sent.shape:
        raise ValueError(f"the engine hashed {received.numel()} tensors, the trainer {sent.numel()}")
    return torch.stack([sent, received])


def times_sent(plan: Plan, world: int) -> torch.Tensor:
    """How many of the trainer's ranks hash each byte of each tensor when they pack it: in every group one of what it
    shares out, every rank of what it holds whole."""
    times = {entry.name: world // bucket.world for bucket in plan.buckets for entry in bucket.entries}
    return torch.tensor([times[name] for name in numbers_of(bucket.entries for bucket in plan.buckets)])


def times_read(tensors: int, everywhere: list[Readings]) -> torch.Tensor:
    """How many engine ranks read each byte of each tensor: int64 of shape ``(tensors,)``; -1 where that is uneven.

    Args:
        tensors: how many there are.
        everywhere: what each rank reads.
    """
    runs: list[dict[int, tuple[Run, ...]]] = [
        {number: found for _, found, numbers in readings for number in numbers} for readings in everywhere
    ]
    sizes = {number: nbytes for readings in everywhere for nbytes, _, numbers in readings for number in numbers}
    readers = [tuple(of_rank.get(number, ()) for of_rank in runs) for number in range(tensors)]
    times = [_times(sizes.get(number, 0), found) for number, found in enumerate(readers)]
    return torch.tensor(times, dtype=torch.int64)


@cache
def _times(nbytes: int, readers: tuple[tuple[Run, ...], ...]) -> int:
    """Every byte is read ``n`` times if and only if ``n`` runs start at the first byte, ``n`` end at the last one, and
    in between as many start as end at every byte."""
    starts, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for run in (run for runs in readers for run in runs):
        begin = run.source + np.arange(run.count, dtype=np.int64) * run.source_stride
        starts.append(begin)
        ends.append(begin + run.width)
    low, high = np.sort(np.concatenate(starts)), np.sort(np.concatenate(ends))
    times, rest = divmod(int((high - low).sum()), nbytes) if nbytes else (0, 0)
    if rest or (times and (low[:times].any() or (high[-times:] != nbytes).any())):
        return -1
    return times if times == 0 or np.array_equal(low[times:], high[:-times]) else -1
