# SPDX-License-Identifier: Apache-2.0
"""The sender's staging memory: slots the trainer rank fills and the engine reads, exported once and kept."""

from __future__ import annotations

from typing import Protocol

import torch

from verl_sync_plugin.transport.memory.exports import StagingExport


class Staging(Protocol):
    """Memory of ``slots`` x ``slot_bytes`` bytes, readable by the receiver."""

    memory: torch.Tensor
    slot_bytes: int

    def export(self, reader: int = 0) -> StagingExport:
        """How a receiver opens it; every reader gets an export of its own."""

    def opened(self) -> None:
        """Called once all receivers have opened their exports."""

    def close(self) -> None:
        """Gives the memory back."""


def slot_of(memory: torch.Tensor, slot: int, slot_bytes: int) -> torch.Tensor:
    """The bytes of one slot: uint8 of shape ``(slot_bytes,)``, a view."""
    return memory.narrow(0, slot * slot_bytes, slot_bytes)


def create_staging(device: torch.device, slots: int, slot_bytes: int) -> Staging:
    """Allocates staging memory beside the trainer's parameters.

    Raises:
        ValueError: no mechanism shares memory of this device type with another process.
    """
    if device.type == "cuda":
        from verl_sync_plugin.transport.memory.cuda_ipc import CudaIpcStaging

        return CudaIpcStaging(device, slots, slot_bytes)
    if device.type == "cpu":
        from verl_sync_plugin.transport.memory.shared_memory import SharedMemoryStaging

        return SharedMemoryStaging(slots, slot_bytes)
    raise ValueError(
        f"weight sync cannot share {device.type!r} memory with the rollout engine; "
        "set actor_rollout_ref.rollout.custom.sync.enabled=False to run stock verl"
    )


def open_staging(export: StagingExport) -> torch.Tensor:
    """The receiver's view of the memory of the trainer rank beside it: uint8 of shape ``(nbytes,)``.

    Raises:
        ValueError: unknown mechanism, or the memory is on a device this process cannot see.
    """
    if export.kind == "cuda_ipc":
        from verl_sync_plugin.transport.memory.cuda_ipc import open_cuda_ipc

        return open_cuda_ipc(export)
    if export.kind == "shared_memory":
        from verl_sync_plugin.transport.memory.shared_memory import open_shared_memory

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
        from verl_sync_plugin.transport.memory.cuda_ipc import open_peer_cuda_ipc

        return open_peer_cuda_ipc(export, device)
    return open_staging(export)


def decline_staging(export: StagingExport) -> None:
    """Tells the sender's side that an export will not be opened here."""
    if export.kind == "cuda_ipc":
        from verl_sync_plugin.transport.memory.cuda_ipc import decline_cuda_ipc

        decline_cuda_ipc(export)
