# SPDX-License-Identifier: Apache-2.0
"""Plays ranks of several hosts on one GPU: NCCL takes ``NCCL_HOSTID`` for a host, and connects them by sockets."""

import faulthandler
import json
import os
import socket
from collections.abc import Callable
from typing import Any

from ports import free_port
from separate.driver import SECONDS, Member, together


def digest(server: Any) -> str:
    """SGLang's own checksums of all parameters of a server's engine."""
    answer = server.ask("POST", "/weights_checker", {"action": "checksum"})
    assert answer["ranks"], answer
    return json.dumps([rank["checksums"] for rank in answer["ranks"]], sort_keys=True)


class Host:
    """A rank that is alone on its host, for the plugin and for NCCL."""

    def __init__(self, rank: int, world: int, port: int, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds * 0.9)  # where it hangs
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
        os.environ.update(MASTER_PORT=str(port), NCCL_HOSTID=f"host {rank}")
        os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        socket.gethostname = lambda: f"host {rank}"  # type: ignore[assignment]
        self._rank = rank

    def play(self, story: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        return story(self._rank, *given)


def play(world: int, story: Callable[..., Any], *given: Any, seconds: float = SECONDS) -> list[Any]:
    """Returns the result of ``story(rank, *given)`` or its ``Failure`` by rank; None for one that died."""
    port = free_port()
    members = [Member("several_hosts_on_gpu.Host", rank, world, port, seconds) for rank in range(world)]
    try:
        assert [member.answer(seconds) for member in members] == ["ready"] * world
        return together(members, "play", story, given, seconds=seconds)
    finally:
        for member in members:  # a thread that still waits for a dead member in NCCL would keep a process from ending
            member.process.kill()
