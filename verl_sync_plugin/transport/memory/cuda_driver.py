# SPDX-License-Identifier: Apache-2.0
"""The few calls of the CUDA driver that share whole allocations between processes, which torch shares per tensor only.

torch's own ``_share_cuda_`` rewires the storage it shares, and counts readers in a file per storage: right for memory
that comes and goes, too much for a trainer's parameters, which are none of our business beyond reading them.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

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
