# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a script share an engine: a group of neighbours, or what a device mesh says."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from verl_sync_plugin.transport.agreement import Agreement, together_seconds

T = TypeVar("T")
TP = "tp"  # the name of the mesh dimension over which an engine is sharded


@dataclass(frozen=True)
class Place:
    """Where a rank computes.

    Attributes:
        host: its name.
        device: its GPU as ``CUDA_VISIBLE_DEVICES`` calls it on that host; empty on a CPU.
    """

    host: str
    device: str


@dataclass(frozen=True)
class EngineGroup:
    """The ranks beside one engine.

    Attributes:
        ranks: of the world, in tensor-parallel order; the first owns the engine.
        devices: theirs, see ``Place``; none on a CPU.
        group: for a few words among them, by gloo; ``None`` when there is one.
    """

    ranks: tuple[int, ...]
    devices: tuple[str, ...]
    group: dist.ProcessGroup | None

    @property
    def leads(self) -> bool:
        """Whether this rank owns the engine."""
        return dist.get_rank() == self.ranks[0]

    def share(self, value: T) -> T:
        """The owner's value (picklable) on all ranks of the group; collective over them."""
        if self.group is None:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=self.ranks[0], group=self.group)
        return held[0]


def engine_ranks(tensor_parallel_size: int | None, mesh: DeviceMesh | None) -> tuple[int, ...]:
    """The ranks of this rank's engine, in tensor-parallel order.

    Raises:
        ValueError: the arguments do not fit the world or each other; names argument, value and remedy.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if mesh is not None:
        ranks = _of_mesh(mesh)
        if tensor_parallel_size not in (None, len(ranks)):
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size}: the mesh says {len(ranks)}. Leave out the former."
            )
        return ranks
    size = 1 if tensor_parallel_size is None else tensor_parallel_size
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or world % size:
        raise ValueError(f"tensor_parallel_size={size!r}: use a number that divides the {world} ranks.")
    first = rank // size * size
    return tuple(range(first, first + size))


def _of_mesh(mesh: DeviceMesh) -> tuple[int, ...]:
    names = mesh.mesh_dim_names or ()
    if TP not in names and mesh.ndim != 1:
        raise ValueError(f"mesh={mesh}: has no dimension named {TP!r}. Name that of the engine's ranks so.")
    own = mesh[TP] if TP in names and mesh.ndim > 1 else mesh
    if own.get_coordinate() is None:
        raise ValueError(f"mesh={mesh}: rank {dist.get_rank()} is not in it. Use a mesh of all ranks.")
    return tuple(own.mesh.flatten().tolist())


def own_place(device: torch.device) -> Place:
    """Where this rank computes."""
    name = ""
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
        index = device.index or 0
        name = visible.split(",")[index].strip() if visible else str(index)
    return Place(socket.gethostname(), name)


def make_groups(
    agreement: Agreement, ranks: tuple[int, ...], device: torch.device, timeout_seconds: float
) -> EngineGroup:
    """Collective over the world.

    Args:
        agreement: of all ranks.
        ranks: of ``engine_ranks``.
        device: this rank's.
        timeout_seconds: bound on one local wait, see ``Agreement``.

    Raises:
        SyncError: the groups overlap, or an engine's GPUs are not on one host; the same text on every rank.
    """
    everywhere = agreement.gather("finding the engines' ranks", ranks)
    places = agreement.gather("finding the engines' devices", own_place(device))
    agreement.step("looking at the engines' ranks", lambda: check_groups(everywhere, places))
    mine: dist.ProcessGroup | None = None
    timeout = timedelta(seconds=together_seconds(timeout_seconds))
    for members in sorted(set(everywhere)):
        if len(members) > 1:
            group = dist.new_group(list(members), backend="gloo", timeout=timeout)
            mine = group if members == ranks else mine
    devices = tuple(places[rank].device for rank in ranks)
    return EngineGroup(ranks, devices if device.type == "cuda" else (), mine)


def check_groups(everywhere: Sequence[tuple[int, ...]], places: Sequence[Place]) -> None:
    """Refuses engines that overlap, spread over hosts, or share a GPU.

    Args:
        everywhere: the ranks of each rank's engine, by rank.
        places: by rank.

    Raises:
        ValueError: names the ranks and the remedy.
    """
    for rank, ranks in enumerate(everywhere):
        if rank not in ranks or any(everywhere[other] != ranks for other in ranks):
            raise ValueError(
                f"the ranks beside one engine disagree: rank {rank} says {ranks}. Use one mesh on all ranks."
            )
        hosts = {places[other].host for other in ranks}
        if len(hosts) > 1:
            raise ValueError(
                f"the engine of ranks {ranks} would be on the hosts {', '.join(sorted(hosts))}, and SpmdRollout launches "
                "none on several. Use a tensor_parallel_size of at most the GPUs of one host."
            )
    taken: dict[Place, int] = {}
    for rank, place in enumerate(places):
        if place.device and place in taken:
            raise ValueError(
                f"ranks {taken[place]} and {rank} are both on GPU {place.device} of {place.host}. Call "
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before SpmdRollout."
            )
        taken[place] = rank
