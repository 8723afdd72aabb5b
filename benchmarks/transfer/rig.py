# SPDX-License-Identifier: Apache-2.0
"""One trainer process with all weights on one device, and one real SGLang server: what transfer and soak measure on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import launch
from benchmarks.transfer import models


@dataclass(frozen=True)
class Rig:
    """What a sync goes between.

    Attributes:
        server: a ``server.Server``.
        named: the trainer's tensors by HF name, each an allocation of its own.
        device: ``cuda`` or ``cpu``.
        nbytes: bytes of the weights in bf16, whatever the trainer holds.
        devices: the GPUs whose memory matters.
    """

    server: Any
    named: list[tuple[str, Any]]
    device: str
    nbytes: int
    devices: tuple[int, ...] = (0,)

    @property
    def tensors(self) -> int:
        return len(self.named)

    def processes(self) -> dict[str, list[psutil.Process]]:
        """All whose growth matters, by what they are."""
        return {"trainer": [psutil.Process()], "schedulers": self.server.schedulers()}

    def other_weights(self) -> None:
        """Turns the trainer's weights into others, and at the next call back into what they were."""
        head = self.named[-1][1]
        head.copy_(head.flip(0))


@contextmanager
def one_rank(work: Path, device: str = "cpu") -> Iterator[None]:
    """This process is the only rank of a trainer; ends every process below it in the end.

    Args:
        work: a folder.
        device: where its collectives are: verl's training engines have some, on a GPU by NCCL; plain tensors have none.
    """
    import torch.distributed as dist

    work.mkdir(parents=True, exist_ok=True)
    # a visit's time limit ends this process alone; unwinding is what ends the server, with its device memory
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    launch.become_subreaper()
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{work}/store-{os.getpid()}", rank=0, world_size=1)
    try:
        yield
    finally:
        launch.end_descendants()
        dist.destroy_process_group()


@contextmanager
def rig(model: str, device: str, dtype: str, work: Path, nccl: bool = False) -> Iterator[Rig]:
    """Starts the server and makes the weights; ends every process below this one.

    ``nccl``: whether the trainer has collectives on the device.
    """
    from benchmarks.transfer.server import Server

    with one_rank(work, device if nccl else "cpu"):
        config = models.write_config(model, work / model)
        named = models.weights(model, device, dtype, work)
        server = Server(config, device, work / f"{model}-server.log")
        try:
            yield Rig(server, named, device, sum(2 * tensor.numel() for _, tensor in named))
        finally:
            server.stop()
