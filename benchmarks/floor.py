# SPDX-License-Identifier: Apache-2.0
"""The physical floor of a sync: every byte read once and written once, at the rate that copies reach on the device."""

from __future__ import annotations

from typing import Any

LINK_BYTES_PER_SECOND = 4.5e11  # an H200's NVLink, one direction, by its specification
DEVICE_BYTES_PER_SECOND = 4.3e12  # an H200's memory, read and written, as copies reach it


def seconds(nbytes: int, world: int = 1, rollout_tp: int = 1) -> float:
    """The floor of one device: it reads what its trainer rank packs and writes what its engine rank loads.

    Args:
        nbytes: bytes of the whole model, as the engine holds it.
        world: trainer ranks that share the packing.
        rollout_tp: engine ranks that share the model.
    """
    return (nbytes / world + nbytes / rollout_tp) / DEVICE_BYTES_PER_SECOND


def of_result(result: dict[str, Any]) -> float | None:
    """The floor of a result's case; None where nothing counted its bytes.

    Both variants get the floor of the one that moves less: stock verl sends fp32 masters, but bf16 is what is needed.
    """
    known = [run["bytes"] for run in result["runs"] if run["bytes"]]
    if not known:
        return None
    settings = result["runs"][0]["settings"]
    if settings.get("rollout_gpus"):  # every engine rank gets its part over a link of its own
        return min(known) / int(settings.get("rollout_tp", 1)) / LINK_BYTES_PER_SECOND
    return seconds(min(known), int(settings.get("gpus", 1)), int(settings.get("rollout_tp", 1)))
