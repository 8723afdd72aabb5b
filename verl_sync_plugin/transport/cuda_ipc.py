"""Staging on GPUs: one CUDA allocation, exported once through CUDA IPC and sliced by offset ever after.

Hazards:
- Memory of PyTorch's expandable segments and of SGLang's memory saver cannot be exported. verl turns expandable
  segments off before ``update_weights``, and the staging memory is allocated by the trainer, outside any saver region.
- One export rebuilt N times drives its reference count negative (vllm #51258): the receiver opens each key once.
- Device ordinals differ between the processes (``CUDA_VISIBLE_DEVICES``), UUIDs do not.
"""

from __future__ import annotations

import uuid

import torch

from verl_sync_plugin.transport.protocol import StagingExport


def _uuid_of(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


class CudaIpcStaging:
    """Sender's end."""

    def __init__(self, device: torch.device, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._key = uuid.uuid4().hex
        self.memory = torch.empty(slots * slot_bytes, dtype=torch.uint8, device=device)
        self._handle: tuple[object, ...] | None = None

    def export(self) -> StagingExport:
        if self._handle is None:
            shared = self.memory.untyped_storage()._share_cuda_()
            self._handle = (_uuid_of(self.memory.get_device()), *shared[1:])
        nbytes = self.memory.numel()
        return StagingExport("cuda_ipc", self._key, nbytes, self.slot_bytes, self._handle)

    def opened(self) -> None:
        """The mapping outlives the handle; nothing to do."""

    def close(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._handle = None


def open_cuda_ipc(export: StagingExport) -> torch.Tensor:
    """Maps the sender's allocation; uint8 of shape ``(nbytes,)`` on the device the sender uses.

    Raises:
        ValueError: that device is not visible here.
    """
    wanted, *shared = export.handle
    visible = [_uuid_of(index) for index in range(torch.cuda.device_count())]
    if wanted not in visible:
        raise ValueError(
            f"the trainer rank's GPU {wanted} is not visible to this SGLang rank (visible: {visible}); "
            "trainer and rollout ranks must share their GPUs in a colocated run"
        )
    storage = torch.UntypedStorage._new_shared_cuda(visible.index(wanted), *shared)
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (export.nbytes,), (1,))
