# SPDX-License-Identifier: Apache-2.0
"""checkpoint-engine's transfer, by the calls that its project describes for a loop of updates; on a GPU only.

It first copies the weights into pinned host memory (registration), then through device buffers of its own into SGLang's
receiver. A trainer that registers while it does something else waits for the update alone, so the two stand apart.
What its receiver's hook cannot do is a warning in the server's log: ``digest`` says what arrived.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from typing import Any

NAME = "checkpoint-engine"
_CHECKPOINT = "trained"
REGISTRATION = "registration_seconds"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def digest(server: Any) -> str:
    """One hash of SGLang's own checksums of all its parameters; on a GPU only."""
    answer = server.ask("POST", "/weights_checker", {"action": "checksum"})
    assert answer["ranks"], answer
    return hash_of([rank["checksums"] for rank in answer["ranks"]])


def hash_of(sums: list[dict[str, str]]) -> str:
    """One hash of the checksums of every rank."""
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


class CheckpointEngine:
    """One parameter server of one rank, in this process; ``torch.distributed`` has NCCL for what is on the device.

    Args:
        server: of one engine rank, on the same device.
        named: the trainer's tensors by HF name.
    """

    def __init__(self, server: Any, named: list[tuple[str, Any]]) -> None:
        from checkpoint_engine.ps import ParameterServer

        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        self._server, self._named = server, dict(named)
        # auto_pg would end the process group after every update
        self._parameters = ParameterServer(auto_pg=False, master_port=_free_port())

    def sync(self) -> dict[str, Any]:
        started = time.perf_counter()
        self._parameters.register_checkpoint(_CHECKPOINT, named_tensors=self._named, use_shared_memory_pool=True)
        self._parameters.gather_metas(_CHECKPOINT)
        registered = time.perf_counter() - started
        self._parameters.update(_CHECKPOINT, self._ask)
        self._parameters.unregister_checkpoint(_CHECKPOINT)
        return {REGISTRATION: round(registered, 6)}

    def _ask(self, handles: list[tuple[str, str]]) -> None:
        """Tells the server where to fetch from; raises where it says that it could not."""
        body = {"zmq_handles": dict(handles), "flush_cache": True}
        self._server.ask("POST", "/update_weights_from_ipc", body)

    def close(self) -> None:
        """Gives the pinned host memory back."""
        self._parameters.register_checkpoint(_CHECKPOINT, named_tensors=self._named, use_shared_memory_pool=True)
        self._parameters.unregister_checkpoint(_CHECKPOINT, force=True)
