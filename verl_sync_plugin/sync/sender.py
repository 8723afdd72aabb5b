# SPDX-License-Identifier: Apache-2.0
"""One trainer rank's side of the protocol: fills slots, broadcasts them, has its engine rank load them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from msgspec.structs import replace

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.copies.packing import Packer, RunPlaces
from verl_sync_plugin.layout.tensors import Bucket, Plan, Shard, numbers_of
from verl_sync_plugin.transport.agreement import await_collective, poll_until
from verl_sync_plugin.transport.channel import Channel
from verl_sync_plugin.transport.memory import Location, Slots, Staging
from verl_sync_plugin.transport.protocol import Commit, Committed, Failed, Hello, Load, Loaded, Manifest, Ready

STAGING_BUCKETS = 2  # what all slots may take, in buckets of the size that the user sets
SLOTS = 3  # one being loaded, one being filled, one on its way between the two
# Broadcasts of a bucket that are under way at once. Each takes some places of CUDA's queue of about a thousand, and a
# host that fills it, say because a rank has died, waits there without a bound.
BROADCASTS = 32
T = TypeVar("T")


def slot_limit(bucket_bytes: int) -> int:
    """The most bytes of one slot, so that all slots fit into ``STAGING_BUCKETS`` buckets of the user's size."""
    return bucket_bytes * STAGING_BUCKETS // SLOTS


def broadcasts_done(works: Sequence[dist.Work], timeout_seconds: float, device: torch.device) -> bool:
    """True if transfers of memory of a device are done. On a CPU they are when it returns, for gloo's end only while
    somebody waits for them. Raises RuntimeError where a peer did not take part."""
    if device.type == "cuda" and not all(work.is_completed() for work in works):
        return False
    for work in works:  # on a GPU it does not wait, but lets go of the memory
        await_collective(work, device, timeout_seconds)
    return True


class BucketSender:
    """Keeps its staging memory until ``unstage``: ``min(SLOTS, buckets)`` slots of ``Plan.slot_bytes``. Each sync
    has a channel of its own to the engine rank.

    All slots stay within two buckets of the user's size where ``plan_buckets`` gets its ``slot_limit``.

    Peak device memory, on the trainer's ``device``: the staging memory; with host-resident parameters also a chunk of
    one on its way there. ``timeout_seconds`` bounds every wait.
    """

    def __init__(self, device: torch.device, timeout_seconds: float) -> None:
        self.device, self._timeout = device, timeout_seconds
        self._channel: Channel | None = None
        self._staging: Staging | None = None
        self._packer: Packer | None = None
        self._under_way: dict[int, Callable[[], bool]] = {}  # by slot, whether its pack and broadcast are done

    @property
    def staging_bytes(self) -> int:
        """Size of the staging memory; 0 when there is none."""
        return 0 if self._staging is None else self._staging.memory.numel()

    def reserve(self, plan: Plan) -> Slots:
        """Makes the staging memory fit ``plan``, or keeps it when it does already; returns where it is."""
        slots, size, staging = min(SLOTS, len(plan.buckets)), plan.slot_bytes, self._staging
        if staging is None or (staging.export.slot_bytes, self.staging_bytes) != (size, slots * size):
            self.unstage()
            staging = self._staging = Staging(self.device, slots, size)
        return staging.export

    def begin(self, plan: Plan, rank: int) -> None:
        """Makes ready to pack all buckets of a plan; ``rank``: this rank's place among the owners of a sharded base."""
        packer = self._packer
        if packer is None or packer.plan is not plan or packer.rank != rank:
            packer = self._packer = Packer(self.device, plan, rank)
        packer.begin()

    def hash_parameters(self, shards: list[Shard], found: RunPlaces) -> None:
        """Waits for what the trainer still has to do on the device, then starts to hash and check all parameters where
        they lie. Raises TimeoutError where the device is busy for longer than the bound."""
        assert self._packer is not None, "begin() comes first"
        self._mark(0)
        self.drain(0)
        self._packer.hash_parameters(shards, found)

    def pack(self, index: int, slot: int, shards: list[Shard]) -> None:
        """Copies this rank's runs of a bucket into its segment of the slot, cast to the wire dtype on the way; copies
        may still run until ``drain``."""
        assert self._packer is not None, "begin() comes first"
        self._packer.pack(index, self._slot(slot), shards)
        self._mark(slot)

    def broken(self) -> list[str]:
        """The tensors of which a NaN or Inf was packed."""
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
        """Starts to complete the slot (the same on all ranks), each segment from the rank of ``senders`` that packed
        it; the bytes are there after ``drain``. ``start`` starts one broadcast of some memory from a rank. Raises
        TimeoutError where the segments of the first ranks are not there within the bound."""
        memory = self._slot(slot)
        works: list[dist.Work] = []
        for place in range(bucket.world):
            if place >= BROADCASTS:
                self._await(partial(broadcasts_done, [works[place - BROADCASTS]], self._timeout, self.device))
            work = start(memory.narrow(0, place * bucket.stride, bucket.stride), senders[place])
            assert work is not None, "this rank takes part"
            works.append(work)
        self._under_way[slot] = partial(broadcasts_done, works, self._timeout, self.device)

    def _mark(self, slot: int) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._under_way[slot] = event.query

    def drain(self, slot: int) -> None:
        """Waits until a slot's pack and broadcast are done. Raises TimeoutError, or RuntimeError where one failed."""
        if (done := self._under_way.pop(slot, None)) is not None:
            self._await(done)

    def _await(self, done: Callable[[], bool]) -> None:
        late = f"the copies of a bucket did not complete within {KEY_PREFIX}.timeout_seconds={self._timeout:g}; "
        late += "look for a rank that died or hangs, and set the key higher if the link is only slow"
        poll_until(done, self._timeout, late)

    def unstage(self) -> None:
        """Gives the staging memory back to torch; the driver keeps what an engine rank has still mapped."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def close(self) -> None:
        """Gives everything back."""
        self.hang_up()
        self._packer = None
        self.unstage()

    def _slot(self, slot: int) -> torch.Tensor:
        assert self._staging is not None, "reserve() comes first"
        return self._staging.slot(slot)

    # ---- words with the engine rank

    def use_channel(self, channel: Channel) -> None:
        """Takes over a fresh channel, so that ``hang_up`` ends it whatever happens next."""
        self.hang_up()
        self._channel = channel

    def handshake(self, hello: Hello, plan: Plan, locations: tuple[Location, ...] = ()) -> Ready:
        """Opens a sync on the adopted channel with the first word, of which the engine rank may lack ``plan`` or
        ``locations``. Returns its answer; with ``refusal`` the sync is over. Raises ChannelClosedError or
        ChannelTimeoutError where it is gone or silent, RuntimeError where it failed."""
        channel = self._open_channel()
        channel.send(hello)
        ready = self._expect(Ready)
        if ready.needs_details:
            details = {"locations": locations} if hello.location_keys else {"manifest": Manifest.of(plan)}
            channel.send(replace(hello, **details))
            ready = self._expect(Ready)
        return ready

    def load(self, bucket_index: int, slot: int) -> None:
        """Tells the engine rank that a slot is ready."""
        self._open_channel().send(Load(bucket_index, slot))

    def wait_loaded(self, bucket_index: int) -> Loaded:
        """Waits until the engine rank no longer needs a bucket's slot."""
        loaded = self._expect(Loaded)
        assert loaded.bucket == bucket_index, f"{loaded} while waiting for bucket {bucket_index}"
        return loaded

    def commit(self, unmap: bool) -> Committed:
        """Ends the sync on this rank; returns what the engine rank did. ``unmap``: it lets go of all staging memory."""
        self._open_channel().send(Commit(unmap))
        return self._expect(Committed)

    def hang_up(self) -> None:
        """Ends the sync whatever its state; the engine rank drops what is unfinished."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _open_channel(self) -> Channel:
        assert self._channel is not None, "use_channel() comes first"
        return self._channel

    def _expect(self, kind: type[T]) -> T:
        message = self._open_channel().receive(self._timeout)
        if isinstance(message, Failed):
            raise RuntimeError(f"the engine could not load the weights: {message.text}")
        if not isinstance(message, kind):
            raise RuntimeError(f"weight-sync protocol: expected {kind.__name__}, got {type(message).__name__}")
        return message
