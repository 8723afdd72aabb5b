# SPDX-License-Identifier: Apache-2.0
"""Staging on GPUs: one CUDA allocation, exported once per reader through CUDA IPC and sliced by offset ever after.

Hazards:
- Memory of PyTorch's expandable segments and of SGLang's memory saver cannot be exported. verl turns expandable
  segments off before ``update_weights``, and the staging memory is allocated by the trainer, outside any saver region.
- One export rebuilt N times drives its reference count negative (vllm #51258): every receiver gets an export of its own
  and opens it once.
- Device ordinals differ between the processes (``CUDA_VISIBLE_DEVICES``), UUIDs do not.
- Memory of another GPU is opened on one's own device, through which the driver reaches it (NVLink or PCIe). Opened on
  the other device it would cost a CUDA context there, some 500 MB per process, and it may not even be visible.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import torch

from verl_sync_plugin.transport.memory.exports import StagingExport


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
