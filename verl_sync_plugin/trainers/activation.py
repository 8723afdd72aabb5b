# SPDX-License-Identifier: Apache-2.0
"""Whether this process's training engine exports shards (plugin on) or verl's own stream (plugin off).

verl builds engine and rollout adapter in the same worker process but gives the rollout config only to the adapter; the
adapter therefore says here what it was configured to do.
"""

from __future__ import annotations

_taken_over = False


def take_over(enabled: bool) -> None:
    """Sets whether the plugin's rollout adapter takes this process's weight stream; called when verl builds the
    adapter."""
    global _taken_over
    _taken_over = enabled


def taken_over() -> bool:
    """Whether the plugin's adapter consumes this process's weight stream."""
    return _taken_over
