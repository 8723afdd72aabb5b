# SPDX-License-Identifier: Apache-2.0
"""Memory of a trainer rank that engine ranks map and read: staging memory and parameters.

On a GPU the driver exports and maps whole allocations, each once. There is no reference count. What moved is exported
again, and the engine unmaps what is no longer named. Hazards:
- The driver lets go of an allocation that its owner has freed only when it is unmapped here as well. So of a model only
  parameters are exported, which the trainer keeps on the device, and scales; ``ParameterLocator`` looks in every sync.
- Memory of PyTorch's expandable segments and of SGLang's memory saver cannot be exported. Our worker, as verl's, turns
  the former off before ``update_weights``, and the staging memory is the trainer's, outside any saver region.
- Memory of another GPU is opened on one's own device, through which the driver reaches it (NVLink or PCIe). Opened on
  the other device it would cost a CUDA context there, some 500 MB per process, and it may not even be visible.

On a CPU staging memory is one piece of anonymous shared memory. It has no name in any file system, so nothing of it can
be left over, however its processes end. Who may look at the trainer's process (the same user, in the same container)
opens it through that process's table of open files.
"""

from __future__ import annotations

import ctypes
import os
import uuid
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from verl_sync_plugin.copies.packing import BY_TORCH, RunPlaces, segment_of
from verl_sync_plugin.layout.tensors import Bucket, Plan, Shard

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_PROCESS = uuid.uuid4().hex  # with its number, which a fork does not share
Spot = tuple[int, int]  # allocation, first byte in it


@dataclass(frozen=True)
class Region:
    """Memory of a trainer rank and how to map it.

    Attributes:
        kind: ``cuda_ipc`` or ``shared_file``.
        key: names the memory, on this host and in this run, and no other memory ever; the receiver maps each key once.
        nbytes: its size.
        handle: the driver's, or a path.
    """

    kind: str
    key: str
    nbytes: int
    handle: bytes


@dataclass(frozen=True)
class Slots:
    """Staging memory of a trainer rank: slots of ``slot_bytes`` from byte ``first`` of a region on."""

    region: Region
    first: int
    slot_bytes: int


@dataclass(frozen=True)
class Location:
    """The places of one trainer rank's runs of all buckets.

    Attributes:
        key: names all of this; changes when anything moves.
        regions: the allocations.
        runs: per bucket little-endian int64 of shape ``(n, 5)``, ascending: first byte in the bucket, bytes in the
            bucket, region, first byte in the region, bytes there per byte in the bucket.
    """

    key: str
    regions: tuple[Region, ...]
    runs: tuple[bytes, ...]


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    torch.cuda.current_stream().query()  # the driver wants a context on this thread; the runtime sees to it
    status = getattr(driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorName(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


def allocation_of(address: int) -> tuple[int, int]:
    """First address and size in bytes of the device allocation that holds an address; RuntimeError without one."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return int(base.value), int(size.value)


def allocation_id(address: int) -> int:
    """A number that no other allocation of this process has had: another may lie there some day. Raises RuntimeError
    where there is no allocation."""
    number = ctypes.c_uint64()
    _call("cuPointerGetAttribute", ctypes.byref(number), _BUFFER_ID, ctypes.c_uint64(address))
    return int(number.value)


def export_allocation(address: int) -> bytes:
    """The handle by which another process of this host opens the allocation at an address. Raises RuntimeError for
    memory that cannot be opened elsewhere (expandable segments, a memory saver's)."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)


def open_allocation(handle: bytes) -> int:
    """Maps another process's allocation on the current device, which may not be the one it is on; returns its address.
    Raises RuntimeError where the driver cannot reach it from here."""
    address = ctypes.c_uint64()
    given = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return int(address.value)


def close_allocation(address: int) -> None:
    """Unmaps what ``open_allocation`` has mapped; RuntimeError where it has not."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


class CudaExporter:
    """Finds and exports allocations of a GPU. An allocation stands for its first address."""

    def __init__(self) -> None:
        self._asked: tuple[object, tuple[int, ...]] = (None, ())
        self._answer: tuple[int, ...] = ()
        self._last = (0, 0)

    def find(self, run: torch.Tensor) -> Spot:
        """Finds the allocation that a tensor lies in. Raises RuntimeError where there is none."""
        address = run.data_ptr()
        base, size = self._last
        if not base <= address < base + size:  # neighbours follow each other
            base, size = self._last = allocation_of(address)
        return base, address - base

    def identities(self, allocations: tuple[int, ...]) -> object:
        """A value that differs when another allocation has taken the place of one of these. Raises RuntimeError where
        one is gone."""
        # As long as torch has freed nothing there is nothing to ask; there may be thousands
        freed = torch.cuda.memory_stats_as_nested_dict().get("num_device_free")
        if freed is None or (freed, allocations) != self._asked:
            self._answer = tuple(map(allocation_id, allocations))
            self._asked = freed, allocations
        return self._answer

    def export(self, allocation: int) -> Region:
        """Makes what an engine rank of this host maps it by. Raises RuntimeError where it cannot be."""
        self._last = (0, 0)  # what was found may be gone by the next time
        _, size = allocation_of(allocation)
        key = f"{_PROCESS}-{os.getpid()}-{allocation_id(allocation)}"
        return Region("cuda_ipc", key, size, export_allocation(allocation))


class SharedFileExporter:
    """The exporter for CPUs: storages that are mapped from a file (``torch.UntypedStorage.from_file``)."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def find(self, run: torch.Tensor) -> Spot:
        storage = run.untyped_storage()
        if storage.filename is None:
            raise RuntimeError("its memory is private to the trainer's process")
        self._storages[storage.data_ptr()] = storage
        return storage.data_ptr(), run.data_ptr() - storage.data_ptr()

    def identities(self, allocations: tuple[int, ...]) -> object:
        return allocations

    def export(self, allocation: int) -> Region:
        storage = self._storages[allocation]
        path = str(storage.filename)
        return Region("shared_file", _file_at(path), storage.nbytes(), path.encode())


def _file_at(path: str) -> str:
    """Names the file at a path: an open file without a name by what it links to, where the path may be another's."""
    return os.readlink(path) if os.path.islink(path) else path


def exporter_of(device: torch.device) -> CudaExporter | SharedFileExporter:
    return CudaExporter() if device.type == "cuda" else SharedFileExporter()


class Staging:
    """``slots`` x ``slot_bytes`` bytes on the trainer's device. Raises RuntimeError where they cannot be shared.

    Attributes:
        memory: all of it; uint8.
        export: what engine ranks of this host map it by.
    """

    def __init__(self, device: torch.device, slots: int, slot_bytes: int) -> None:
        nbytes = slots * slot_bytes
        if device.type == "cuda":
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        else:
            descriptor = os.memfd_create(f"verl-sync-{uuid.uuid4().hex}")
            self._closed = weakref.finalize(self, os.close, descriptor)
            os.ftruncate(descriptor, nbytes)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            self.memory = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        exporter = exporter_of(device)
        allocation, first = exporter.find(self.memory)
        self.export = Slots(exporter.export(allocation), first, slot_bytes)

    def slot(self, number: int) -> torch.Tensor:
        """One slot: uint8 of shape ``(slot_bytes,)``, a view."""
        return self.memory.narrow(0, number * self.export.slot_bytes, self.export.slot_bytes)

    def close(self) -> None:
        if self.memory.device.type == "cpu":
            self._closed()
        self.memory = torch.empty(0, dtype=torch.uint8)


class NotInPlaceError(RuntimeError):
    """A parameter cannot be read where it lies; the text says which and why."""


class ParameterLocator:
    """Finds where one trainer rank's parameters lie (``found``), and keeps the answer while nothing moves. The trainer
    computes on ``device``; ``rank`` is its place among the owners of a sharded base."""

    def __init__(self, device: torch.device, plan: Plan, rank: int) -> None:
        self.plan = plan
        self._rank = rank
        self._device = device
        held = [part for each in plan.buckets for part in each.slices if part.count(plan.bases[part.base], rank) > 0]
        self.found = RunPlaces(list(dict.fromkeys(part.base for part in held)), device)
        self._exporter = exporter_of(device)
        self._identities: object = None
        self._allocations: tuple[int, ...] = ()
        self._location: Location | None = None

    def locate(self, shards: Sequence[Shard]) -> Location:
        """Looks where all parameters of the plan are now. Raises NotInPlaceError where one is merged, on the host, not
        contiguous or aligned, to be cast otherwise than from fp32 to bf16, or in memory that cannot be shared."""
        moved = self.found.locate(shards)
        if moved or self._location is None or not self._same():
            self._location = None
            self._location = self._tell(shards)
        return self._location

    def _same(self) -> bool:
        try:
            return self._exporter.identities(self._allocations) == self._identities
        except RuntimeError:
            return False

    def _tell(self, shards: Sequence[Shard]) -> Location:
        for base, kind in self.found.kinds.items():
            if kind == BY_TORCH:
                raise NotInPlaceError(f"{shards[base].base.key!r} {_why(shards[base], self._device)}")
        numbers: dict[int, int] = {}  # of the allocations
        places: dict[int, tuple[int, int, int]] = {}  # by base; see ``_runs``
        for base, (_, dtype) in zip(self.found.bases, self.found.places, strict=True):
            run = shards[base].run
            assert run is not None, "looked up before"
            try:
                allocation, first = self._exporter.find(run)
            except RuntimeError as error:
                raise NotInPlaceError(f"{shards[base].base.key!r}: {error}") from error
            ratio = dtype.itemsize // self.plan.bases[base].itemsize
            places[base] = numbers.setdefault(allocation, len(numbers)), first, ratio
        self._allocations = tuple(numbers)
        try:
            regions = tuple(map(self._exporter.export, self._allocations))
            self._identities = self._exporter.identities(self._allocations)
        except RuntimeError as error:
            raise NotInPlaceError(f"memory of parameters cannot be shared: {error}") from error
        return Location(uuid.uuid4().hex, regions, tuple(self._runs(bucket, places) for bucket in self.plan.buckets))

    def _runs(self, bucket: Bucket, places: dict[int, tuple[int, int, int]]) -> bytes:
        """Those of a bucket, as in ``Location``. ``places``: by base its region, the first byte in it, and the bytes
        there per byte in the bucket."""
        rows = []
        for part in bucket.slices:
            base = self.plan.bases[part.base]
            count = part.count(base, self._rank)
            if count > 0:
                region, first, ratio = places[part.base]
                offset = segment_of(bucket, self._rank) * bucket.stride + part.offset
                rows.append((offset, count * base.itemsize, region, first + part.begin * base.itemsize * ratio, ratio))
        return np.array(rows, dtype="<i8").reshape(-1, 5).tobytes()


def _why(shard: Shard, device: torch.device) -> str:
    run = shard.local()
    if run.device != device:
        return f"is on {run.device}, not on {device}"
    if shard.merge is not None and shard.fill is None:
        return "is merged with its adapter on the way"
    same = torch.bfloat16 if shard.fill is not None else getattr(torch, shard.base.dtype)
    if run.dtype not in (same, torch.float32):
        return f"is {run.dtype} and travels as {shard.base.dtype}"
    return "is not contiguous, not aligned to 16 bytes, or needs a cast that the copy kernel does not have"


class Regions:
    """The regions that an engine rank has mapped, by key."""

    def __init__(self) -> None:
        self._mapped: dict[str, torch.Tensor] = {}

    def map(self, wanted: Iterable[Region]) -> None:
        """Maps what is not mapped yet and unmaps all else. Raises RuntimeError or OSError where the memory cannot be
        reached from here."""
        regions = {region.key: region for region in wanted}
        for key in self._mapped.keys() - regions.keys():
            _unmap(self._mapped.pop(key))
        for key, region in regions.items():
            if key not in self._mapped:
                self._mapped[key] = _map(region)

    def flat(self, region: Region) -> torch.Tensor:
        """All bytes of a region: uint8 of shape ``(nbytes,)``, for torch on this process's device."""
        return self._mapped[region.key]

    def slot(self, slots: Slots, number: int) -> torch.Tensor:
        """One slot of staging memory: uint8 of shape ``(slot_bytes,)``, a view."""
        return self.flat(slots.region).narrow(0, slots.first + number * slots.slot_bytes, slots.slot_bytes)


def _map(region: Region) -> torch.Tensor:
    if region.kind == "cuda_ipc":
        device = torch.device("cuda", torch.cuda.current_device())
        address = open_allocation(region.handle)
        storage = torch._C._construct_storage_from_data_pointer(address, device, region.nbytes)
        flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (region.nbytes,), (1,))
        try:
            flat[:1].cpu()  # a mapping without a way to the memory shows here, and not in the middle of a load
        except RuntimeError:
            close_allocation(address)
            raise
        return flat
    path = region.handle.decode()
    # Another process may have the number of the trainer's, in another container; and ``from_file`` would make a file
    if not os.path.isfile(path) or _file_at(path) != region.key or os.path.getsize(path) < region.nbytes:
        raise FileNotFoundError(f"{path} with the trainer's {region.nbytes} bytes is not visible here")
    return torch.from_file(path, shared=True, size=region.nbytes, dtype=torch.uint8)


def _unmap(flat: torch.Tensor) -> None:
    if flat.device.type == "cuda":
        torch.cuda.current_stream().synchronize()  # of a sync that failed, kernels may still read it
        close_allocation(flat.data_ptr())
