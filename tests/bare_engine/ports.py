# SPDX-License-Identifier: Apache-2.0
"""Ports that no other test's connections take."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def group_port() -> int:
    """A port for SGLang's process group, below those that the system gives to connections. SGLang looks for a free one
    and binds it seconds later, when a connection of a test beside may have it."""
    for port in range(28_000 + os.getpid() % 2000, 31_000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")
