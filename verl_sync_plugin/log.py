# SPDX-License-Identifier: Apache-2.0
"""Lines in the output of a process, which Ray forwards to the driver: verl sets no log level for plugins."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any


def say(text: str) -> None:
    """Prints one line that names the process it comes from. A line that cannot be printed ends nothing."""
    with suppress(OSError, ValueError):
        print(f"[verl-sync-plugin] pid {os.getpid()} {text}", flush=True)


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def say_unused(method: str, arguments: Mapping[str, Any]) -> None:
    """Names the arguments that a newer verl gives to one of our methods, and that nothing here uses."""
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value not in (None, False))
    if given:
        say(f"{method} does not use what this verl gives it: {given}")
