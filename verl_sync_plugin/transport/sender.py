"""One trainer rank's side of the protocol: fills slots, gathers them, tells its engine rank to load them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from verl_sync_plugin.bucket import Bucket, Plan
from verl_sync_plugin.source.base import Shard
from verl_sync_plugin.transport.channel import Channel
from verl_sync_plugin.transport.protocol import (
    Commit,
    Committed,
    Coverage,
    Failed,
    Hello,
    Load,
    Loaded,
    Manifest,
    Ready,
    describe,
)
from verl_sync_plugin.transport.staging import Staging, create_staging, slot_of

T = TypeVar("T")

SLOTS = 2  # one being loaded, one being filled


class EngineFailedError(RuntimeError):
    """The engine rank beside this trainer rank reported a failure."""


class BucketSender:
    """Keeps its staging memory between syncs: ``min(SLOTS, buckets)`` slots of the largest bucket's size.

    Peak device memory: the staging memory; with host-resident parameters also one shard on its way to the device.
    """

    def __init__(self, device: torch.device, timeout_seconds: float) -> None:
        self._device = device
        self._timeout = timeout_seconds
        self._staging: Staging | None = None
        self._channel: Channel | None = None

    def reserve(self, plan: Plan) -> None:
        """Makes the staging memory fit ``plan``; keeps it when it does already."""
        slots = min(SLOTS, len(plan.buckets))
        if self._staging is not None:
            held = (self._staging.slot_bytes, self._staging.memory.numel())
            if held == (plan.slot_bytes, slots * plan.slot_bytes):
                return
            self._staging.close()
            self._staging = None
        self._staging = create_staging(self._device, slots, plan.slot_bytes)

    def adopt(self, channel: Channel) -> None:
        """Takes over a fresh channel, so that ``hang_up`` ends it whatever happens next."""
        self.hang_up()
        self._channel = channel

    def greet(self, sync_id: str, plan: Plan) -> None:
        """Opens a sync on the adopted channel.

        Raises:
            ChannelClosedError, ChannelTimeoutError: the engine rank is gone or silent.
            EngineFailedError: it refused.
        """
        assert self._staging is not None, "reserve() comes first"
        channel = self._open_channel()
        channel.send(Hello(sync_id, plan.digest, self._staging.export()))
        if self._expect(Ready).needs_plan:
            channel.send(Manifest(tuple(bucket.entries for bucket in plan.buckets)))
        self._staging.opened()

    def pack(self, bucket: Bucket, slot: int, shards: list[Shard], rank: int) -> None:
        """Copies this rank's runs into its segment of the slot, cast to the wire dtype on the way."""
        pack_segment(self._slot(slot), bucket, shards, rank)

    def gather(self, bucket: Bucket, slot: int, rank: int, group: dist.ProcessGroup | None) -> None:
        """Completes the slot from all ranks' segments, in place, and waits until the bytes are there.

        Raises:
            TimeoutError: a peer did not take part in time.
        """
        memory = self._slot(slot).narrow(0, 0, bucket.nbytes)
        if bucket.world > 1:
            mine = memory.narrow(0, rank * bucket.stride, bucket.stride)
            work = dist.all_gather_into_tensor(memory, mine, group=group, async_op=True)
            if memory.is_cuda:
                work.wait()  # orders streams; does not block the host
            else:
                work.wait(timedelta(seconds=self._timeout))
        if memory.is_cuda:
            self._drain()

    def _drain(self) -> None:
        """Waits for the current stream like ``synchronize``, but with a bound: a dead peer leaves NCCL hanging."""
        event = torch.cuda.Event()
        event.record()
        deadline = time.monotonic() + self._timeout
        while not event.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"a bucket's all-gather did not complete within {self._timeout:g} s")
            time.sleep(2e-5)

    def load(self, bucket_index: int, slot: int) -> None:
        """Tells the engine rank that a slot is ready."""
        self._open_channel().send(Load(bucket_index, slot))

    def wait_loaded(self, bucket_index: int) -> float:
        """Waits until the engine rank no longer needs a bucket's slot; returns the seconds its loading took."""
        loaded = self._expect(Loaded)
        assert loaded.bucket == bucket_index, f"{describe(loaded)} while waiting for bucket {bucket_index}"
        return loaded.seconds

    def commit(self) -> Coverage:
        """Ends the sync on this rank; returns what the engine rank's ledger found."""
        self._open_channel().send(Commit())
        return self._expect(Committed).coverage

    def hang_up(self) -> None:
        """Ends the sync whatever its state; the engine rank drops what is unfinished."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def close(self) -> None:
        """Gives the staging memory back."""
        self.hang_up()
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def _slot(self, slot: int) -> torch.Tensor:
        assert self._staging is not None, "reserve() comes first"
        return slot_of(self._staging.memory, slot, self._staging.slot_bytes)

    def _open_channel(self) -> Channel:
        assert self._channel is not None, "adopt() comes first"
        return self._channel

    def _expect(self, kind: type[T]) -> T:
        message = self._open_channel().receive(self._timeout)
        if isinstance(message, Failed):
            raise EngineFailedError(f"SGLang could not load the weights: {message.text}")
        if not isinstance(message, kind):
            raise EngineFailedError(f"weight-sync protocol: expected {kind.__name__}, got {describe(message)}")
        return message


def pack_segment(memory: torch.Tensor, bucket: Bucket, shards: list[Shard], rank: int) -> None:
    """Fills segment ``rank`` of a bucket.

    Args:
        memory: uint8, at least ``bucket.nbytes`` long.
        bucket: what goes where.
        shards: all shards of this rank, by base index.
        rank: this rank's place in the group.
    """
    segment = memory.narrow(0, rank * bucket.stride, bucket.stride)
    for part in bucket.slices:
        shard = shards[part.base]
        if part.begin >= shard.base.lengths[rank]:
            continue
        run = shard.local()[part.begin : part.end]
        target = segment.narrow(0, part.offset, run.numel() * shard.base.itemsize)
        if run.device != target.device:
            # Move, then cast: a casting copy across devices would cast on the host
            run = run.to(target.device, non_blocking=True)
        if shard.merge is not None:
            run = shard.merge(run, part.begin)
        target.view(getattr(torch, shard.base.dtype)).copy_(run)
