# SPDX-License-Identifier: Apache-2.0
"""Memory of a trainer rank that engine ranks map and read: staging memory and parameters.

Staging memory is exported once per reader and kept. A parameter lives as long as the model, so the allocation that it
lies in is exported once and mapped once, and nobody is counted. What moved is exported again, and the engine unmaps
what is no longer named.

Hazard: the driver lets go of an allocation that its owner has freed only when it is unmapped here as well. Only memory
of parameters is exported, which the trainer keeps on the device; ``sync/ways.py`` looks every time.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from verl_sync_plugin.copies.packing import ALONE, CAST, Found, segment_of
from verl_sync_plugin.layout.tensors import Bucket, Plan, Shard
from verl_sync_plugin.transport.memory import cuda
from verl_sync_plugin.transport.memory.host import (
    Live,
    Region,
    SharedFileExporter,
    SharedMemoryStaging,
    StagingExport,
    open_shared_memory,
)


class Staging(Protocol):
    """Memory of ``slots`` x ``slot_bytes`` bytes, readable by the receiver."""

    memory: torch.Tensor
    slot_bytes: int

    def export(self, reader: int = 0) -> StagingExport:
        """Makes what a receiver opens it by; every reader gets an export of its own."""

    def opened(self) -> None:
        """Called once all receivers have opened their exports."""

    def close(self) -> None:
        """Gives the memory back."""


def slot_of(memory: torch.Tensor, slot: int, slot_bytes: int) -> torch.Tensor:
    """The bytes of one slot: uint8 of shape ``(slot_bytes,)``, a view."""
    return memory.narrow(0, slot * slot_bytes, slot_bytes)


def create_staging(device: torch.device, slots: int, slot_bytes: int) -> Staging:
    """Allocates staging memory on the trainer's device.

    Raises:
        ValueError: no mechanism shares memory of this device type with another process.
    """
    if device.type == "cuda":
        return cuda.CudaIpcStaging(device, slots, slot_bytes)
    if device.type == "cpu":
        return SharedMemoryStaging(slots, slot_bytes)
    raise ValueError(
        f"weight sync cannot share {device.type!r} memory with the rollout engine; "
        "set actor_rollout_ref.rollout.custom.sync.enabled=False to run stock verl"
    )


def open_staging(export: StagingExport) -> torch.Tensor:
    """The receiver's view of the memory of its own trainer rank: uint8 of shape ``(nbytes,)``.

    Raises:
        ValueError: unknown mechanism, or the memory is on a device this process cannot see.
    """
    if export.kind == "cuda_ipc":
        return cuda.open_cuda_ipc(export)
    if export.kind == "shared_memory":
        return open_shared_memory(export)
    raise ValueError(f"unknown staging mechanism {export.kind!r}")


def open_peer_staging(export: StagingExport, device: torch.device) -> torch.Tensor:
    """The receiver's view of the memory of a trainer rank elsewhere on this host: uint8 of shape ``(nbytes,)``.

    Args:
        export: made for this receiver.
        device: the receiver's own.

    Raises:
        RuntimeError, OSError: it cannot be reached from here.
    """
    if export.kind == "cuda_ipc":
        return cuda.open_peer_cuda_ipc(export, device)
    return open_staging(export)


def decline_staging(export: StagingExport) -> None:
    """Tells the sender's side that an export will not be opened here."""
    if export.kind == "cuda_ipc":
        cuda.decline_cuda_ipc(export)


class Exporter(Protocol):
    """Finds and exports the allocations of one kind of device."""

    def find(self, run: torch.Tensor) -> tuple[int, int]:
        """The allocation that a tensor lies in (a number that stands for it), and the tensor's first byte in it.

        Raises:
            RuntimeError: its memory cannot be shared.
        """

    def identities(self, allocations: tuple[int, ...]) -> object:
        """A value for these allocations that differs when another allocation has taken the place of one of them.

        Raises:
            RuntimeError: one is gone.
        """

    def export(self, allocation: int) -> Region:
        """Makes what an engine rank of this host maps it by.

        Raises:
            RuntimeError: it cannot.
        """


def exporter_for(device: torch.device) -> Exporter:
    if device.type == "cuda":
        return cuda.CudaExporter()
    return SharedFileExporter()


class Regions:
    """The regions that an engine rank has mapped, by key."""

    def __init__(self) -> None:
        self._mapped: dict[str, int] = {}
        self._storages: dict[str, Any] = {}

    @property
    def mapped(self) -> frozenset[str]:
        """Keys of what is mapped."""
        return frozenset(self._mapped)

    def map(self, wanted: Iterable[Region]) -> None:
        """Maps what is not mapped yet and unmaps all else.

        Raises:
            RuntimeError, OSError: the memory cannot be reached from here.
        """
        regions = {region.key: region for region in wanted}
        for key in self._mapped.keys() - regions.keys():
            self._unmap(key)
        for key, region in regions.items():
            if key not in self._mapped:
                self._mapped[key] = self._map(region)

    def address(self, region: Region) -> int:
        return self._mapped[region.key]

    def flat(self, region: Region) -> torch.Tensor:
        """All bytes of a region in host memory: uint8 of shape ``(nbytes,)``."""
        storage = self._storages[region.key]
        return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (region.nbytes,), (1,))

    def _map(self, region: Region) -> int:
        if region.kind == "cuda_ipc":
            return cuda.open_allocation(region.handle[0])
        if not os.path.isfile(region.handle[0]):  # from_file would make one
            raise FileNotFoundError(f"{region.handle[0]} is not visible here")
        storage: Any = torch.UntypedStorage.from_file(region.handle[0], True, region.nbytes)
        self._storages[region.key] = storage
        return storage.data_ptr()

    def _unmap(self, key: str) -> None:
        address, storage = self._mapped.pop(key), self._storages.pop(key, None)
        if storage is None:
            torch.cuda.current_stream().synchronize()  # of a sync that failed, kernels may still read it
            cuda.close_allocation(address)


Place = tuple[int, int]  # allocation, first byte in it


class NotInPlaceError(RuntimeError):
    """A parameter cannot be read where it lies; the text says which and why."""


class LiveParameters:
    """One trainer rank's account of where its parameters lie, sent once and kept while everything stays where it is.

    Args:
        device: where the trainer computes.
        plan: all buckets.
        rank: this rank's place among the owners of a sharded base.

    Attributes:
        found: where the parameters are.
    """

    def __init__(self, device: torch.device, plan: Plan, rank: int) -> None:
        self.plan = plan
        self._rank = rank
        self._device = device
        held = [part for each in plan.buckets for part in each.slices if part.count(plan.bases[part.base], rank) > 0]
        self.found = Found(list(dict.fromkeys(part.base for part in held)), device)
        self._exporter = exporter_for(device)
        self._identities: object = None
        self._allocations: tuple[int, ...] = ()
        self._live: Live | None = None

    def look(self, shards: Sequence[Shard]) -> Live:
        """Looks where all parameters of the plan are now.

        Raises:
            NotInPlaceError: a parameter is merged, on the host, of a dtype that has to be cast otherwise than from fp32
                to bf16, or in memory that cannot be shared.
        """
        moved = self.found.look(shards)
        if not moved and self._live is not None and self._same():
            return self._live
        self._live = None
        for base, kind in self.found.kinds.items():
            if kind == ALONE:
                raise NotInPlaceError(f"{shards[base].base.key!r} {_why(shards[base], self._device)}")
        self._live = self._tell(shards)
        return self._live

    def _same(self) -> bool:
        try:
            return self._exporter.identities(self._allocations) == self._identities
        except RuntimeError:
            return False

    def _tell(self, shards: Sequence[Shard]) -> Live:
        places: dict[int, Place] = {}
        for base in self.found.bases:
            run = self.found.run(base, shards[base])
            assert run is not None, "looked up before"
            try:
                places[base] = self._exporter.find(run)
            except RuntimeError as error:
                raise NotInPlaceError(f"{shards[base].base.key!r}: {error}") from error
        self._allocations = tuple(dict.fromkeys(allocation for allocation, _ in places.values()))
        try:
            regions: list[Region] = [self._exporter.export(allocation) for allocation in self._allocations]
            self._identities = self._exporter.identities(self._allocations)
        except RuntimeError as error:
            raise NotInPlaceError(f"memory of parameters cannot be shared: {error}") from error
        number = {allocation: index for index, allocation in enumerate(self._allocations)}
        runs = tuple(self._runs(bucket, places, number) for bucket in self.plan.buckets)
        return Live(uuid.uuid4().hex, tuple(regions), runs)

    def _runs(self, bucket: Bucket, places: dict[int, Place], number: dict[int, int]) -> bytes:
        rows = []
        for part in bucket.slices:
            base = self.plan.bases[part.base]
            count = part.count(base, self._rank)
            if count > 0:
                grow = 2 if self.found.kinds[part.base] == CAST else 1
                allocation, first = places[part.base]
                offset = segment_of(bucket, self._rank) * bucket.stride + part.offset
                source = first + part.begin * base.itemsize * grow
                rows.append((offset, count * base.itemsize, number[allocation], source, grow))
        return np.array(rows, dtype="<i8").reshape(-1, 5).tobytes()


def _why(shard: Shard, device: torch.device) -> str:
    if shard.merge is not None:
        return "is merged with its adapter on the way"
    run = shard.local()
    if run.device != device:
        return f"is on {run.device}, not on {device}"
    if run.dtype not in (getattr(torch, shard.base.dtype), torch.float32):
        return f"is {run.dtype} and travels as {shard.base.dtype}"
    return "is not laid out for it"
