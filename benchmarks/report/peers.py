# SPDX-License-Identifier: Apache-2.0
"""Other projects' transfers beside stock's and the plugin's: their seconds, and what these leave out."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import schema

HEAD = ("peer", "what the peer leaves out")
# of results that were written before their versions named peers
RELEASES = {"checkpoint-engine": "0.4.2", "awex": "0.9.0"}
# what has to be the same for two results to be of one transfer, with what older results mean by leaving it out
_ALIKE = (("model", ""), ("trainer", ""), ("trainer_dtype", "bfloat16"), ("rollout_gpus", 0), ("hosts", 1))
_NO_PROOF = "As measured it hashes nothing, looks for no NaN and compares nothing in the engine"
_LEFT_OUT = {
    "checkpoint-engine": (
        "what comes before it: {registration}, and gathering shards, since it moves what one process holds whole (as "
        f"stock and plugin do here). {_NO_PROOF}; what its receiver's hook cannot do is a warning in the server's log"
    ),
    "awex": (
        "metadata, plan and NCCL group, which its first exchange makes ({first} in all); collecting the garbage of "
        f"what its processes held before. {_NO_PROOF}; Megatron trainers only"
    ),
}


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


def _first(run: dict[str, Any]) -> str:
    return _seconds(run["samples"]["first_syncs"][0]["seconds"])


def _registration(run: dict[str, Any]) -> str:
    """Of checkpoint-engine: what it takes to copy the weights into pinned host memory, later and at first."""
    name = "registration_seconds"
    later = [sync["report"][name] for sync in run["samples"]["syncs"] if name in sync["report"]]
    firsts = [sync["report"][name] for sync in run["samples"]["first_syncs"][:1] if name in sync.get("report", {})]
    if not later:
        return "copying the weights into pinned host memory, of which this result does not tell"
    at_first = f"; {_seconds(firsts[0])} at first" if firsts else ""
    return f"copying the weights into pinned host memory ({_seconds(statistics.median(later))}{at_first})"


def runs_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of peers in a result."""
    return [run for run in result["runs"] if run["variant"] in schema.PEERS]


def cells(result: dict[str, Any], plugin: float | None, shown: Callable[[float], str]) -> list[str]:
    """The columns of ``HEAD``: a peer's name, release and seconds, and what these leave out.

    Args:
        result: of a transfer.
        plugin: seconds of the plugin in it.
        shown: how the table writes seconds.
    """
    told, left_out = [], []
    for run in runs_of(result):
        name, seconds = run["variant"], run["stages"]["phase"]
        release = result.get("versions", {}).get(name, RELEASES[name])
        times = f", {seconds / plugin:.1f} × the plugin's" if plugin else ""
        told.append(f"{name} {release}: {shown(seconds)}{times}")
        left_out.append(_LEFT_OUT[name].format(registration=_registration(run), first=_first(run)))
    return ["; ".join(told), "; ".join(left_out)]


def note(result: dict[str, Any], shown: Callable[[float], str]) -> str:
    """What else is known of the peers in a result, to be added to its note; empty without peers."""
    text = ""
    ours = {run["variant"]: run for run in reversed(result["runs"]) if run["variant"] in ("plugin", "stock")}
    # with stock in the result the note has told the plugin's already
    beside = f", the plugin's {_first(ours['plugin'])}" if ours.keys() == {"plugin"} else ""
    for run in runs_of(result):
        text += f"; {run['variant']}'s first sync {_first(run)}{beside}"
        syncs = run["samples"]["syncs"]
        writer = [sync["report"]["writer_seconds"] for sync in syncs if "writer_seconds" in sync["report"]]
        text += f", of a later one its writer takes {shown(statistics.median(writer))}" if writer else ""
    return text


def stock_elsewhere(result: dict[str, Any], results: list[dict[str, Any]]) -> tuple[str, float] | None:
    """Case and seconds of stock verl in another result of the same transfer on machines of the same kind; ``None``
    where there are no peers, where stock was measured beside them, or where no other result has it."""
    if not runs_of(result) or any(run["variant"] == "stock" for run in result["runs"]):
        return None
    for other in results:
        for run in other["runs"] if _kind(other) == _kind(result) else ():
            if run["variant"] == "stock":
                return str(other["case"]), float(run["stages"]["phase"])
    return None


def _kind(result: dict[str, Any]) -> tuple[Any, ...]:
    machine, settings = result["machine"], result["runs"][0]["settings"]
    alike = [settings.get(name, default) for name, default in _ALIKE]
    return (machine["gpu"], machine.get("gpus"), *alike, settings["bucket_mb"])
