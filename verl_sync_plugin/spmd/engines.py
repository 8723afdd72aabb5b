# SPDX-License-Identifier: Apache-2.0
"""A script's engines: which ranks share one, the process of each, and calls of it that all ranks wait for together."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from verl_sync_plugin.errors import RankLostError, RolloutError, SyncError
from verl_sync_plugin.rollouts import LocalLaunch
from verl_sync_plugin.rollouts.process import EngineProcess
from verl_sync_plugin.transport.agreement import Agreement, together_seconds

T = TypeVar("T")
TP = "tp"  # the name of the mesh dimension over which an engine is sharded
ROUND_SECONDS = 1.0


class Place(NamedTuple):
    """The device of a rank: its host's name, and its GPU as ``CUDA_VISIBLE_DEVICES`` calls it there ("" on a CPU)."""

    host: str
    device: str


@dataclass(frozen=True)
class EngineGroup:
    """The ranks next to one engine.

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
        """True if this rank owns the engine."""
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
        names = mesh.mesh_dim_names or ()
        if TP not in names and mesh.ndim != 1:
            raise ValueError(f"mesh={mesh}: has no dimension named {TP!r}. Name that of the engine's ranks so.")
        own = mesh[TP] if TP in names and mesh.ndim > 1 else mesh
        if own.get_coordinate() is None:
            raise ValueError(f"mesh={mesh}: rank {rank} is not in it. Use a mesh of all ranks.")
        ranks = tuple(own.mesh.flatten().tolist())
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


def own_place(device: torch.device) -> Place:
    name = ""
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
        index = device.index or 0
        name = visible.split(",")[index].strip() if visible else str(index)
    return Place(socket.gethostname(), name)


def make_groups(
    agreement: Agreement, ranks: tuple[int, ...], device: torch.device, timeout_seconds: float
) -> EngineGroup:
    """The group of this rank's engine, which ``engine_ranks`` found. Collective over the world.

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
            raise ValueError(f"the ranks of one engine disagree: rank {rank} says {ranks}. Use one mesh on all ranks.")
        hosts = {places[other].host for other in ranks}
        if len(hosts) > 1:
            raise ValueError(
                f"the engine of ranks {ranks} would be on the hosts {', '.join(sorted(hosts))}, and SpmdRollout "
                "launches none on several. Use a tensor_parallel_size of at most the GPUs of one host."
            )
    taken: dict[Place, int] = {}
    for rank, place in enumerate(places):
        if place.device and place in taken:
            raise ValueError(
                f"ranks {taken[place]} and {rank} are both on GPU {place.device} of {place.host}. Call "
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before SpmdRollout."
            )
        taken[place] = rank


class OwnEngine:
    """Launches one on the ranks that own one. Collective, as ``call`` is.

    Args:
        agreement: of all ranks.
        group: of this rank's engine.
        launch: of the engine.

    Raises:
        SyncError: an engine could not be launched; the same text on every rank.

    Attributes:
        process: ``None`` on a rank that owns none.
    """

    def __init__(self, agreement: Agreement, group: EngineGroup, launch: LocalLaunch) -> None:
        self.process: EngineProcess | None = None
        self._agreement = agreement

        def start() -> None:
            if group.leads:
                self.process = EngineProcess(launch, group.devices)

        try:
            agreement.step("starting the engine", start)
            self._awaited("launching the engine", None if self.process is None else self.process.ready)
        except BaseException:
            self.close()
            raise

    def call(self, what: str, method: str, *arguments: Any) -> Any:
        """Calls a method of the server on all engines; ``what`` names the step in messages.

        Returns:
            The answer of this rank's engine, once every engine has answered; ``None`` where it owns none.

        Raises:
            SyncError: any engine failed, which ends the wait of all; the same text on every rank.
        """
        return self._awaited(what, None if self.process is None else self.process.ask(method, *arguments))

    def _awaited(self, what: str, future: Future[Any] | None) -> Any:
        """Waits in rounds: an engine may take any time, and a rank that has failed is heard at once."""
        answer = None
        while True:
            with self._agreement.attempt():
                if future is not None and wait([future], ROUND_SECONDS).done:
                    answer, future = future.result(), None
            if not self._agreement.settle(what, waiting=future is not None):
                return answer

    def abort(self) -> None:
        """Ends the requests of this rank's engine; not collective."""
        if self.process is not None:
            self.process.ask("abort")

    def close(self) -> None:
        """Ends the engine; not collective."""
        if self.process is not None:
            self.process.close()


@contextmanager
def errors(what: str) -> Iterator[None]:
    """Context in which a failure is no failed sync, but a ``RolloutError``; ``what`` names the work in its message."""
    try:
        yield
    except RankLostError:
        raise
    except SyncError as error:
        raise RolloutError(f"{what} failed.\n{str(error).partition(chr(10))[2] or error}") from error
