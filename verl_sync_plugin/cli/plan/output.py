# SPDX-License-Identifier: Apache-2.0
"""What ``verl-sync plan`` prints: lines for people, or JSON (docs/plan.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

GIB = 2**30
UNKNOWN = "whether every GPU can map the others' memory, and which bytes each engine rank finds on its own GPU"


def as_text(found: Mapping[str, Any]) -> str:
    return "\n".join(_lines(found))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    trainer = found["trainer"]
    layout = "".join(f" {name.upper()}{trainer[name]}" for name in ("tp", "pp", "ep") if trainer[name] > 1)
    yield (
        f"{found['model']}: {found['tensors']} tensors, {size(found['bytes'])} of bf16; "
        f"{trainer['kind']} on {trainer['world']} GPUs{layout} -> TP{found['rollout_tp']}"
    )
    about = "" if found["buckets_exact"] else "about "
    for each in found["deliveries"]:
        yield f"{each['when']}: {each['name']}" + (f" ({each['why']})" if each["why"] else "")
        yield (
            f"  {found['tensors']} tensors, {size(each['bytes'])} in {about}{each['buckets']} buckets ({each['name']})"
            if each["buckets"]
            else "  read where they lie: nothing is staged"
        )
        if each["buckets"]:
            yield f"  staging memory per GPU: {each['staging_bytes'] / 2**20:.1f} MiB"
    yield f"engine loads {found['loading']['text']}"
    yield f"only the first sync knows {UNKNOWN}"
    yield from _memory_lines(found)
    seconds = found["seconds"]
    low, high = seconds["phase"]
    yield (
        f"predicted, from the links below: update_weights {seconds['update_weights']:.3f} s, whole phase {low:.2f} to "
        f"{high:.2f} s; the first sync takes {seconds['first'][0]:g} to {seconds['first'][1]:g} s as measured so far"
    )
    for name, link in seconds["links"].items():
        yield f"  {name}: {link['gigabytes_per_second']:g} GB/s ({link['source']})"
    for warning in found["warnings"]:
        yield f"WARNING: {warning}"


def _memory_lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield "peak memory per GPU, GiB, without activations (predicted):"
    yield f"  {'':18}{'trainer':>9}{'staging':>9}{'weights':>9}{'KV':>9}{'sum':>9}"
    for each in found["memory"]:
        values = "".join(f"{each[key] / GIB:9.1f}" for key in ("trainer", "staging", "weights", "kv", "total"))
        yield f"  {each['moment']:18}{values}"
    if not found["gpu_bytes"]:
        yield "  without --gpu-memory-gb the KV cache is left out, and nothing is compared"


def size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3f} MB"
