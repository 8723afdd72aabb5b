# SPDX-License-Identifier: Apache-2.0
"""Allocations in which a trainer rank's parameters lie, told to and mapped by the engine ranks that read them there.

A parameter lives as long as the model, so an allocation is exported once and mapped once, and nobody is counted. What
moved is exported anew, and the engine unmaps what it is no longer told of.

Hazard: the driver lets go of an allocation that its owner has freed only when it is unmapped here as well. Only memory
of parameters is exported, which the trainer keeps on the device; ``sync/delivery/direct.py`` looks every time.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from verl_sync_plugin.transport.memory.exports import Region


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
        """How an engine rank of this host maps it.

        Raises:
            RuntimeError: it cannot.
        """


class CudaExporter:
    """The exporter for GPUs; an allocation is identified by its first address."""

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._asked: tuple[object, tuple[int, ...]] = (None, ())
        self._answer: tuple[int, ...] = ()
        self._last = (0, 0)

    def find(self, run: torch.Tensor) -> tuple[int, int]:
        from verl_sync_plugin.transport.memory import cuda_driver

        address = run.data_ptr()
        base, size = self._last
        if not base <= address < base + size:  # neighbours follow each other
            base, size = self._last = cuda_driver.allocation_of(address)
        return base, address - base

    def identities(self, allocations: tuple[int, ...]) -> object:
        from verl_sync_plugin.transport.memory import cuda_driver

        # As long as torch has freed nothing there is nothing to ask; there may be thousands
        freed = torch.cuda.memory_stats_as_nested_dict().get("num_device_free")
        if freed is None or (freed, allocations) != self._asked:
            self._answer = cuda_driver.allocation_ids(allocations)
            self._asked = freed, allocations
        return self._answer

    def export(self, allocation: int) -> Region:
        from verl_sync_plugin.transport.memory import cuda_driver

        self._last = (0, 0)  # what was found may be gone by the next time
        _, size = cuda_driver.allocation_of(allocation)
        (number,) = cuda_driver.allocation_ids((allocation,))
        return Region("cuda_ipc", f"{self._name}-{number}", size, (cuda_driver.export_allocation(allocation),))


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


def exporter_for(device: torch.device) -> Exporter:
    return CudaExporter() if device.type == "cuda" else SharedFileExporter()


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
            from verl_sync_plugin.transport.memory import cuda_driver

            return cuda_driver.open_allocation(region.handle[0])
        if not os.path.isfile(region.handle[0]):  # from_file would make one
            raise FileNotFoundError(f"{region.handle[0]} is not visible here")
        storage: Any = torch.UntypedStorage.from_file(region.handle[0], True, region.nbytes)
        self._storages[region.key] = storage
        return storage.data_ptr()

    def _unmap(self, key: str) -> None:
        address, storage = self._mapped.pop(key), self._storages.pop(key, None)
        if storage is None:
            from verl_sync_plugin.transport.memory import cuda_driver

            torch.cuda.current_stream().synchronize()  # of a sync that failed, kernels may still read it
            cuda_driver.close_allocation(address)
