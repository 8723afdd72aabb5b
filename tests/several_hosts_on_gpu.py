# SPDX-License-Identifier: Apache-2.0
"""Ranks that count as ranks of several hosts on one GPU: NCCL then connects them by sockets.

NCCL refuses two ranks on one GPU of one host, and takes what ``NCCL_HOSTID`` says for a host.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ports import free_port

SECONDS = 240.0


def count_as_host(name: str) -> None:
    """This process is on a host of that name, for the plugin and for NCCL; call it before either has asked."""
    from verl_sync_plugin.sync import membership, ways

    os.environ.update(NCCL_HOSTID=name, NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    ways.host_name = lambda: name
    membership._device_name = lambda device: f"{name}'s {device}"  # on one GPU the plugin would refuse the two


def digest(server: Any) -> str:
    """SGLang's own checksums of all parameters of a server's engine."""
    answer = server.ask("POST", "/weights_checker", {"action": "checksum"})
    assert answer["ranks"], answer
    return json.dumps([rank["checksums"] for rank in answer["ranks"]], sort_keys=True)


def _member(
    pipe: Connection, story: Callable[..., Any], rank: int, world: int, port: int, seconds: float, given: Any
) -> None:
    faulthandler.dump_traceback_later(seconds * 0.9)  # where it hangs
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), NCCL_HOSTID=f"host {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    socket.gethostname = lambda: f"host {rank}"  # type: ignore[assignment]
    try:
        pipe.send(story(rank, *given))
    except BaseException:
        pipe.send(traceback.format_exc())
        raise
    os._exit(0)  # a thread that still waits for a dead member in NCCL would keep this process


def play(world: int, story: Callable[..., Any], *given: Any, seconds: float = SECONDS) -> list[Any]:
    """Returns the result of ``story(rank, *given)`` or its traceback by rank; None for one that died or was silent."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    members: list[tuple[Any, Connection]] = []
    found = []
    end = time.monotonic() + seconds
    try:
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_member, args=(theirs, story, rank, world, port, seconds, given))
            process.start()
            theirs.close()
            members.append((process, ours))
        for _, pipe in members:
            try:
                found.append(pipe.recv() if pipe.poll(max(end - time.monotonic(), 0)) else None)
            except EOFError:
                found.append(None)
    finally:
        for process, _ in members:
            process.join(5)
            process.kill()
    return found
