# SPDX-License-Identifier: Apache-2.0
"""Memory of GPUs that two processes see: staging memory, and the allocations in which parameters lie.

Staging memory is one allocation, exported once per reader by torch's CUDA IPC and sliced by offset. Hazards:
- Memory of PyTorch's expandable segments and of SGLang's memory saver cannot be exported. verl turns expandable
  segments off before ``update_weights``, and the staging memory is allocated by the trainer, outside any saver region.
- One export rebuilt N times drives its reference count negative (vllm #51258): every receiver gets an export of its own
  and opens it once.
- Device ordinals differ between the processes (``CUDA_VISIBLE_DEVICES``), UUIDs do not.
- Memory of another GPU is opened on one's own device, through which the driver reaches it (NVLink or PCIe). Opened on
  the other device it would cost a CUDA context there, some 500 MB per process, and it may not even be visible.

Parameters are shared by the driver's own calls, as whole allocations: torch's ``_share_cuda_`` rewires the storage it
shares, and counts readers in a file per storage.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Sequence
from functools import cache

import torch

from verl_sync_plugin.transport.memory.host import Region, StagingExport

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@cache
def driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:  # torch calls other makers' devices cuda as well
        raise RuntimeError(f"there is no CUDA driver: {error}") from error


def _call(name: str, *arguments: object) -> None:
    torch.cuda.current_stream().query()  # the driver wants a context on this thread; the runtime sees to it
    status = getattr(driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorName(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


def allocation_of(address: int) -> tuple[int, int]:
    """First address and size in bytes of the device allocation that holds an address.

    Raises:
        RuntimeError: there is none.
    """
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return int(base.value), int(size.value)


def allocation_ids(addresses: tuple[int, ...]) -> tuple[int, ...]:
    """For each address a number that no other allocation of this process has had: another may lie there some day.

    Raises:
        RuntimeError: there is no allocation at one.
    """
    number = ctypes.c_uint64()
    pointer = ctypes.byref(number)
    found = []
    for address in addresses:
        _call("cuPointerGetAttribute", pointer, _BUFFER_ID, ctypes.c_uint64(address))
        found.append(int(number.value))
    return tuple(found)


def export_allocation(address: int) -> bytes:
    """The handle by which another process of this host opens the allocation at an address.

    Raises:
        RuntimeError: memory of this kind cannot be opened elsewhere (expandable segments, a memory saver's).
    """
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)


def open_allocation(handle: bytes) -> int:
    """Maps another process's allocation on the current device, which may not be the one it is on; returns its address.

    Raises:
        RuntimeError: the driver cannot reach it from here.
    """
    address = ctypes.c_uint64()
    given = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return int(address.value)


def close_allocation(address: int) -> None:
    """Unmaps what ``open_allocation`` has mapped.

    Raises:
        RuntimeError: it is not mapped.
    """
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def _uuid_of(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


class CudaIpcStaging:
    """The sender's end of staging memory on a GPU."""

    def __init__(self, device: torch.device, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._key = uuid.uuid4().hex
        self.memory = torch.empty(slots * slot_bytes, dtype=torch.uint8, device=device)
        self._handles: dict[int, tuple[object, ...]] = {}

    def export(self, reader: int = 0) -> StagingExport:
        if reader not in self._handles:
            shared = self.memory.untyped_storage()._share_cuda_()
            self._handles[reader] = (_uuid_of(self.memory.get_device()), *shared[1:])
        nbytes = self.memory.numel()
        return StagingExport("cuda_ipc", self._key, nbytes, self._handles[reader], self.slot_bytes)

    def opened(self) -> None:
        """The readers have unmapped what came before, so that can go."""
        torch.cuda.ipc_collect()

    def close(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._handles = {}


def open_cuda_ipc(export: StagingExport) -> torch.Tensor:
    """Maps the sender's allocation; uint8 of shape ``(nbytes,)`` on the device the sender uses.

    Raises:
        ValueError: that device is not visible here.
    """
    wanted, *shared = export.handle
    visible = [_uuid_of(index) for index in range(torch.cuda.device_count())]
    if wanted not in visible:
        raise ValueError(
            f"the trainer rank's GPU {wanted} is not visible to this engine rank (visible: {visible}); "
            "set CUDA_VISIBLE_DEVICES alike for trainer and rollout ranks of a host"
        )
    return _map(export, visible.index(wanted), shared)


def open_peer_cuda_ipc(export: StagingExport, device: torch.device) -> torch.Tensor:
    """Maps an allocation of another GPU; uint8 of shape ``(nbytes,)``, for torch a tensor on ``device``.

    Raises:
        RuntimeError: the driver cannot reach that GPU from this one.
    """
    _, *shared, _ = export.handle
    # The last word asks to wait for an event of the other device; the protocol's own words order reads after writes
    flat = _map(export, device.index, [*shared, False])
    flat[:1].cpu()  # a mapping without a way to the memory shows here, and not in the middle of a load
    return flat


def decline_cuda_ipc(export: StagingExport) -> None:
    """Gives back an export that will not be opened; its count would keep the sender's memory for good."""
    _, _, _, _, counter, offset, *_ = export.handle
    torch.UntypedStorage._release_ipc_counter(counter, offset, device=torch.device("cuda"))


def _map(export: StagingExport, index: int, shared: Sequence[object]) -> torch.Tensor:
    storage = torch.UntypedStorage._new_shared_cuda(index, *shared)
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (export.nbytes,), (1,))


class CudaExporter:
    """The exporter for GPUs; an allocation is identified by its first address."""

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._asked: tuple[object, tuple[int, ...]] = (None, ())
        self._answer: tuple[int, ...] = ()
        self._last = (0, 0)

    def find(self, run: torch.Tensor) -> tuple[int, int]:
        address = run.data_ptr()
        base, size = self._last
        if not base <= address < base + size:  # neighbours follow each other
            base, size = self._last = allocation_of(address)
        return base, address - base

    def identities(self, allocations: tuple[int, ...]) -> object:
        # As long as torch has freed nothing there is nothing to ask; there may be thousands
        freed = torch.cuda.memory_stats_as_nested_dict().get("num_device_free")
        if freed is None or (freed, allocations) != self._asked:
            self._answer = allocation_ids(allocations)
            self._asked = freed, allocations
        return self._answer

    def export(self, allocation: int) -> Region:
        self._last = (0, 0)  # what was found may be gone by the next time
        _, size = allocation_of(allocation)
        (number,) = allocation_ids((allocation,))
        return Region("cuda_ipc", f"{self._name}-{number}", size, (export_allocation(allocation),))
