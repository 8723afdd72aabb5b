# SPDX-License-Identifier: Apache-2.0
"""Lines in the output of a process, which Ray forwards to the driver: verl sets no log level for plugins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def say(text: str) -> None:
    """Prints one line that names the process it comes from."""
    print(f"[verl-sync-plugin] pid {os.getpid()} {text}", flush=True)


def say_unused(method: str, arguments: Mapping[str, Any]) -> None:
    """Names the arguments that a newer verl gives to one of our methods, and that nothing here uses."""
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value not in (None, False))
    if given:
        say(f"{method} does not use what this verl gives it: {given}")
