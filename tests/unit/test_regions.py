# SPDX-License-Identifier: Apache-2.0
"""Allocations of device memory, mapped by another process; what needs no GPU is in ``test_direct_load``."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp

from verl_sync_plugin.copies.table import KernelTable, addresses
from verl_sync_plugin.transport.memory import CudaExporter, Region, Regions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
NUMEL = 3 << 20


def _read(rank: int, region: Region, offset: int, answers: object) -> None:
    """What another process finds there, on its last device: the hash of the bytes as the kernel reads them."""
    from verl_sync_plugin.copies.plain import Block

    device = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(device)
    regions, found = Regions(), []
    for _ in range(2):
        regions.map([region])
        bases = addresses(0, [regions.address(region)], device)
        sums = torch.zeros(1, dtype=torch.int64, device=device)
        KernelTable([Block(offset, 0, 0, 4 * NUMEL)], device).run(bases, sums, copy=False)
        found.append(sums.item())
        regions.map([])  # and again: nothing counts how often
    answers.put(found)  # type: ignore[attr-defined]


def test_another_process_reads_a_tensor_where_it_lies() -> None:
    from verl_sync_plugin.copies import plain

    device = torch.device("cuda", 0)
    first, second = (torch.randn(NUMEL, device=device) for _ in range(2))
    exporter = CudaExporter()
    allocation, offset = exporter.find(second)
    region = exporter.export(allocation)
    assert allocation + offset == second.data_ptr() and offset + second.nbytes <= region.nbytes
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_read, args=(region, offset, answers), nprocs=1)
    expected = plain.hash_bytes(second.cpu().view(torch.uint8), 0).item()
    assert answers.get() == [expected, expected]
    del first


def test_an_allocation_in_the_place_of_another_is_another() -> None:
    torch.cuda.empty_cache()
    exporter, tensor = CudaExporter(), torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    address, (allocation, _) = tensor.data_ptr(), exporter.find(tensor)
    before, key = exporter.identities((allocation,)), exporter.export(allocation).key
    assert exporter.identities((allocation,)) == before
    del tensor
    torch.cuda.empty_cache()
    again = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    if again.data_ptr() == address:
        assert exporter.identities((allocation,)) != before and exporter.export(allocation).key != key


def test_expandable_segments_cannot_be_exported() -> None:
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        tensor = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    exporter = CudaExporter()
    with pytest.raises(RuntimeError, match="cuIpcGetMemHandle"):
        exporter.export(exporter.find(tensor)[0])
