# SPDX-License-Identifier: Apache-2.0
"""One trainer rank's side of the protocol: fills slots, broadcasts them, tells its engine rank to load them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.copies.packing import Found, Packer
from verl_sync_plugin.layout.tensors import Bucket, Plan, Shard, numbers_of
from verl_sync_plugin.transport.channel import Conversation
from verl_sync_plugin.transport.memory import Staging, StagingExport, create_staging, slot_of

STAGING_BUCKETS = 2  # what all slots may take, in buckets of the size that the user sets
SLOTS = 3  # one being loaded, one being filled, one on its way between the two
SPIN_SECONDS = 0.005
# Broadcasts of a bucket that are under way at once. Each takes some places of CUDA's queue of about a thousand, and a
# host that fills it, say because a rank has died, waits there without a bound.
BROADCASTS = 32


def slot_limit(bucket_bytes: int) -> int:
    """The most bytes of one slot, so that all slots fit into ``STAGING_BUCKETS`` buckets of the user's size."""
    return bucket_bytes * STAGING_BUCKETS // SLOTS


class Arrival:
    """Transfers that were started, asked as an event is.

    Args:
        works: one for each, or for several.
        timeout_seconds: how long ``query`` may wait on a CPU.
        device: where their memory is.
    """

    def __init__(self, works: Sequence[dist.Work], timeout_seconds: float, device: torch.device) -> None:
        self._works = list(works)
        self._bound = timedelta(seconds=timeout_seconds)
        self._cuda = device.type == "cuda"

    def query(self) -> bool:
        """True if all are done; on a CPU they are when it returns, for gloo's end only while somebody waits for them.

        Raises:
            RuntimeError: a peer did not take part.
        """
        if self._cuda and not all(work.is_completed() for work in self._works):
            return False
        for work in self._works:  # on a GPU it does not wait, but lets go of the memory
            if self._cuda:
                work.wait()
            else:
                work.wait(self._bound)
        return True


class BucketSender(Conversation):
    """Keeps its staging memory until ``unstage``: ``min(SLOTS, buckets)`` slots of the largest bucket's size.

    Give ``plan_buckets`` the size ``slot_limit`` of what the user sets, and all slots stay within two of those.

    Peak device memory: the staging memory; with host-resident parameters also one shard on its way to the device.
    """

    def __init__(self, device: torch.device, timeout_seconds: float) -> None:
        super().__init__(timeout_seconds)
        self._device = device
        self._staging: Staging | None = None
        self._packer: Packer | None = None
        self._events: dict[int, torch.cuda.Event | Arrival] = {}

    @property
    def staged(self) -> bool:
        """True if there is staging memory."""
        return self._staging is not None

    @property
    def staging_bytes(self) -> int:
        """Size of the staging memory; 0 when there is none."""
        return 0 if self._staging is None else self._staging.memory.numel()

    def reserve(self, plan: Plan) -> None:
        """Makes the staging memory fit ``plan``; keeps it when it does already."""
        slots = min(SLOTS, len(plan.buckets))
        if self._staging is not None:
            held = (self._staging.slot_bytes, self._staging.memory.numel())
            if held == (plan.slot_bytes, slots * plan.slot_bytes):
                return
            self.unstage()
        self._staging = create_staging(self._device, slots, plan.slot_bytes)

    def begin(self, plan: Plan, rank: int) -> None:
        """Makes ready to pack all buckets of a plan.

        Args:
            plan: what will be packed.
            rank: this rank's place among the owners of a sharded base.
        """
        packer = self._packer
        if packer is None or packer.plan is not plan or packer.rank != rank:
            packer = self._packer = Packer(self._device, plan, rank)
        packer.begin()

    def export(self, reader: int = 0) -> StagingExport:
        """Makes an export by which a trainer rank's engine rank opens this rank's slots; one per reader."""
        assert self._staging is not None, "reserve() comes first"
        return self._staging.export(reader)

    def opened(self) -> None:
        """All readers have opened their exports."""
        if self._staging is not None:
            self._staging.opened()

    def read(self, shards: list[Shard], found: Found) -> None:
        """Waits for what the trainer still has to do on the device, then starts to hash and check all parameters where
        they lie.

        Raises:
            TimeoutError: the device is busy for longer than the bound.
        """
        assert self._packer is not None, "begin() comes first"
        self._mark(0)
        self.drain(0)
        self._packer.read(shards, found)

    def pack(self, index: int, slot: int, shards: list[Shard]) -> None:
        """Copies this rank's runs of a bucket into its segment of the slot, cast to the wire dtype on the way; copies
        may still run until ``drain``."""
        assert self._packer is not None, "begin() comes first"
        self._packer.pack(index, self._slot(slot), shards)
        self._mark(slot)

    def broken(self) -> list[int]:
        """Indices of buckets in which a NaN or Inf was packed."""
        assert self._packer is not None, "begin() comes first"
        return self._packer.broken()

    def sums(self, plan: Plan) -> torch.Tensor:
        """The hash of what this rank packed of each tensor of the plan: int64 of shape ``(tensors,)``; zeros on a rank
        that packs nothing."""
        if self._packer is None:
            return torch.zeros(len(numbers_of(bucket.entries for bucket in plan.buckets)), dtype=torch.int64)
        return self._packer.sums()

    def broadcast(
        self, bucket: Bucket, slot: int, senders: Sequence[int], start: Callable[[torch.Tensor, int], dist.Work | None]
    ) -> None:
        """Starts to complete the slot on all ranks, each segment from the rank that packed it; the bytes are there
        after ``drain``.

        Args:
            bucket: in the slot.
            slot: the same on all ranks.
            senders: the rank that sends each segment.
            start: starts one broadcast of some memory from a rank.

        Raises:
            TimeoutError: the bound has passed before the segments of the first ranks were there.
        """
        memory = self._slot(slot)
        works: list[dist.Work] = []
        for place in range(bucket.world):
            if place >= BROADCASTS:
                self._await(Arrival([works[place - BROADCASTS]], self._timeout, self._device))
            work = start(memory.narrow(0, place * bucket.stride, bucket.stride), senders[place])
            assert work is not None, "this rank takes part"
            works.append(work)
        self._events[slot] = Arrival(works, self._timeout, self._device)

    def _mark(self, slot: int) -> None:
        if self._device.type == "cuda":
            event = self._events[slot] = torch.cuda.Event()
            event.record()

    def drain(self, slot: int) -> None:
        """Waits until a slot's pack and broadcast are done, like ``synchronize`` but with a bound: a dead peer leaves
        NCCL hanging.

        Raises:
            TimeoutError: the bound has passed.
        """
        event = self._events.pop(slot, None)
        if event is not None:
            self._await(event)

    def _await(self, event: torch.cuda.Event | Arrival) -> None:
        started = time.monotonic()
        while not event.query():
            waited = time.monotonic() - started
            if waited > self._timeout:
                raise TimeoutError(
                    f"the copies of a bucket did not complete within {KEY_PREFIX}.timeout_seconds={self._timeout:g}; "
                    "look for a rank that died or hangs, and set the key higher if the link is only slow"
                )
            if waited > SPIN_SECONDS:  # a sleep lasts some 70 us, a good part of a bucket's time
                time.sleep(2e-5)

    def unstage(self) -> None:
        """Gives the staging memory back, once no reader has it mapped."""
        if self._staging is not None:
            self._staging.close()
            self._staging.opened()
            self._staging = None

    def close(self) -> None:
        """Gives everything back."""
        self.hang_up()
        self._packer = None
        self.unstage()

    def _slot(self, slot: int) -> torch.Tensor:
        assert self._staging is not None, "reserve() comes first"
        return slot_of(self._staging.memory, slot, self._staging.slot_bytes)
