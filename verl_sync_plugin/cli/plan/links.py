# SPDX-License-Identifier: Apache-2.0
"""How fast bytes go by which way, and what a sync is predicted to take: no measurement of this machine.

Rates are of what was measured on H200s (``benchmarks/results``), or assumed where nothing was; the table says which.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A way of bytes.

    Attributes:
        gigabytes_per_second: bytes of the trainer's dtype that one GPU takes in.
        source: the result that says so, or that it is assumed.
    """

    gigabytes_per_second: float
    source: str


LINKS = {
    "own": Link(2000.0, "dense-7b-2gpu-megatron-tp2-tp2-full: 7.62 GB in 3.8 ms, read where they lie on the same GPU"),
    "staged": Link(900.0, "transfer-dense-7b-1gpu: 15.2 GB packed and loaded in 33.8 ms, each at twice that rate"),
    "nvlink": Link(370.0, "dense-7b-2gpu-fsdp2-tp1-full: 15.2 GB of fp32 of the other GPU in 41 ms"),
    "gather": Link(170.0, "dense-7b-2gpu-fsdp2-tp2-full-gathered: 15.2 GB completed and loaded in 89 ms"),
    "host": Link(47.0, "dense-1p8b-1gpu-fsdp2-tp1-lora32-offload: 7.1 GB of offloaded fp32 in 0.15 s"),
    "pcie": Link(25.0, "assumed: half of a PCIe 5 link's payload; no machine without NVLink was measured"),
    "network": Link(40.0, "assumed: 400 Gbit/s per GPU at four fifths; no network was measured"),
}
# What every update_weights takes beside its bytes: 14 ms, and 1.4 µs per tensor (moe-16b-4gpu…: 27 ms, 9651 tensors)
FIXED_SECONDS = 0.014
SECONDS_PER_TENSOR = 1.4e-6
# Sleeping, waking, making room, which are the driver's and SGLang's: dense-1p8b-1gpu-megatron-tp1-rooms 0.05 s,
# dense-7b-2gpu-fsdp2-tp2-full-gathered 0.38 s
AROUND_SECONDS = (0.05, 0.38)
AWAKE_SECONDS = (0.008, 0.008)  # dense-7b-2gpu-fsdp2-tp2-resident
FIRST_SECONDS = (1.0, 15.0)  # all first syncs of 1.8 B to 16 B models with sleeping engines in benchmarks/results


@dataclass(frozen=True)
class Volume:
    """What one engine rank takes in, and one trainer rank packs, in bytes.

    Attributes:
        wire: of the whole model, in the wire's dtype.
        packed: what a trainer rank packs.
        own: what an engine rank reads from the trainer rank on its GPU.
        peer: what it reads from others.
        widening: bytes of the trainer's dtype per byte on the wire.
        offloaded: what a trainer rank reads from host memory.
        crossed: what a rank receives from other nodes.
    """

    wire: int
    packed: int
    own: int
    peer: int
    widening: float
    offloaded: int = 0
    crossed: int = 0


def volume(wire: int, group: int, tp: int, alike: float, widening: float, offload: bool, per_node: int) -> Volume:
    """What each rank moves.

    Args:
        wire: bytes of the model on the wire.
        group: trainer ranks that share it out.
        tp: the rollout's tensor parallelism.
        alike: share of its bytes that an engine rank finds on its own GPU.
        widening: see ``Volume``.
        offload: the trainer's parameters are in host memory.
        per_node: GPUs of one node.
    """
    crossed = wire * (group - per_node) // group // per_node if group > per_node else 0
    needed = wire // tp
    own = int(needed * alike)
    offloaded = int(wire // group * widening) if offload else 0
    return Volume(wire, wire // group, own, needed - own, widening, offloaded, crossed)


def share_alike(kind: str, group: int, tp: int, tensor_parallel_only: bool) -> float:
    """The share of an engine rank's bytes that lie on its own GPU.

    Megatron with the same tensor parallelism has all; FSDP with as many ranks as the engine had 78 % (4 ranks) and
    85 % (2 ranks); where they cut differently it is the rank's part of the model.
    """
    if group == 1:
        return 1.0
    if kind == "megatron":
        return 1.0 if tensor_parallel_only and group == tp else 1 / group
    return 0.8 if group == tp else 1 / group


def predict(delivery: str, moved: Volume, tensors: int, link: str) -> float:
    """Predicted seconds of ``update_weights``, from the second or third sync on.

    Args:
        delivery: but ``auto``.
        moved: what each rank moves.
        tensors: of the model.
        link: between GPUs: ``nvlink``, ``pcie`` or ``network``; with ``exchanged``, those of one node.
    """
    between = LINKS[link].gigabytes_per_second * 1e9
    seconds = (
        FIXED_SECONDS + tensors * SECONDS_PER_TENSOR + moved.offloaded / (LINKS["host"].gigabytes_per_second * 1e9)
    )
    staged = LINKS["staged"].gigabytes_per_second * 1e9
    if delivery == "direct":
        own = LINKS["own"].gigabytes_per_second * 1e9
        return seconds + moved.widening * (moved.own / own + moved.peer / between)
    if delivery in ("sharded", "exchanged"):
        network = LINKS["network"].gigabytes_per_second * 1e9
        return seconds + (moved.packed + moved.own) / staged + moved.peer / between + moved.crossed / network
    gather = between if link != "nvlink" else LINKS["gather"].gigabytes_per_second * 1e9
    return seconds + moved.wire / gather


def used(delivery: str, link: str, moved: Volume) -> list[str]:
    """The links by which a prediction goes."""
    ways = {"direct": ["own", link], "sharded": ["staged", link], "exchanged": ["staged", link, "network"]}
    names = ways.get(delivery, ["gather" if link == "nvlink" else link])
    names = [name for name in names if name != link or moved.peer or delivery in ("gathered", "broadcast")]
    return names + (["host"] if moved.offloaded else [])
