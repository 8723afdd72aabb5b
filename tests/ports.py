# SPDX-License-Identifier: Apache-2.0
"""Ports that no connection takes before the process that is given one binds it."""

import itertools
import random
import socket
from contextlib import suppress

# Linux gives outgoing connections no port below 32768; Ray and the CPU stack choose theirs above 10000
_PORTS = range(2_000, 6_000)
_next = itertools.count(random.SystemRandom().randrange(len(_PORTS)))


def free_port() -> int:
    for number in itertools.islice(_next, len(_PORTS)):
        port = _PORTS[number % len(_PORTS)]
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")
