# SPDX-License-Identifier: Apache-2.0
"""Descriptions of memory that two processes see; and that of CPUs: staging memory, the files in which parameters lie.

Staging memory is one piece of anonymous shared memory. It has no name in any file system, so nothing of it can be
left over, however its processes end. Who may look at the trainer's process (the same user, in the same container)
opens it through that process's table of open files.
"""

from __future__ import annotations

import contextlib
import os
import uuid
import weakref
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Region:
    """Memory of a trainer rank and how to map it.

    Attributes:
        kind: ``cuda_ipc``, ``shared_memory`` or ``shared_file``.
        key: names the memory, on this host and in this run, and no other memory ever; the receiver maps each key once.
        nbytes: its size.
        handle: what the mechanism needs: numbers, texts and bytes, which travel as they are (no lists, no tuples).
    """

    kind: str
    key: str
    nbytes: int
    handle: tuple[Any, ...]


@dataclass(frozen=True)
class StagingExport(Region):
    """The sender's staging memory.

    Attributes:
        slot_bytes: size of one of its slots.
    """

    slot_bytes: int


@dataclass(frozen=True)
class Live:
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


class SharedMemoryStaging:
    """The sender's end of staging memory on a CPU."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._key = uuid.uuid4().hex
        descriptor = os.memfd_create(_name(self._key))
        self._let_go = weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, slots * slot_bytes)
        self._path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.memory = torch.from_file(self._path, shared=True, size=slots * slot_bytes, dtype=torch.uint8)

    def export(self, reader: int = 0) -> StagingExport:
        return StagingExport("shared_memory", self._key, self.memory.numel(), (self._path,), self.slot_bytes)

    def opened(self) -> None:
        """Does nothing: shared memory needs no notice of its readers."""

    def close(self) -> None:
        self._let_go()
        self.memory = torch.empty(0, dtype=torch.uint8)


def open_shared_memory(export: StagingExport) -> torch.Tensor:
    """Maps the sender's memory; uint8 of shape ``(nbytes,)``.

    Raises:
        FileNotFoundError: it is not there, as in another container, where the same number may be another process's.
    """
    path, found = export.handle[0], ""
    with contextlib.suppress(OSError):
        found = os.readlink(path)
    if found != f"/memfd:{_name(export.key)} (deleted)" or os.path.getsize(path) != export.nbytes:
        raise FileNotFoundError(f"{path} with the trainer's {export.nbytes} bytes is not visible here")
    return torch.from_file(path, shared=True, size=export.nbytes, dtype=torch.uint8)


def _name(key: str) -> str:
    return f"verl-sync-{key}"


class SharedFileExporter:
    """The exporter for CPUs: storages that are mapped from a file (``torch.UntypedStorage.from_file``)."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def find(self, run: torch.Tensor) -> tuple[int, int]:
        storage = run.untyped_storage()
        if storage.filename is None:
            raise RuntimeError("its memory is private to the trainer's process")
        self._storages[storage.data_ptr()] = storage
        return storage.data_ptr(), run.data_ptr() - storage.data_ptr()

    def identities(self, allocations: tuple[int, ...]) -> object:
        return allocations

    def export(self, allocation: int) -> Region:
        storage = self._storages[allocation]
        name = str(storage.filename)
        return Region("shared_file", name, storage.nbytes(), (name,))
