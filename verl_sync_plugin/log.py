# SPDX-License-Identifier: Apache-2.0
"""Lines in the output of a process, which Ray forwards to the driver: verl sets no log level for plugins."""

from __future__ import annotations

import os


def say(text: str) -> None:
    """Prints one line that names the process it comes from."""
    print(f"[verl-sync-plugin] pid {os.getpid()} {text}", flush=True)
