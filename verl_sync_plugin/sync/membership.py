# SPDX-License-Identifier: Apache-2.0
"""Forms the group of trainer and rollout ranks on GPUs of their own, and keeps it while nobody comes, goes or is lost.

verl has every process ``prepare``, builds a topology in the driver, and has every process join its group, before every
sync; and ``finalize`` after it. Here a process says who it is, and the driver lists who is there.
"""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist

from verl_sync_plugin.errors import RankLostError, SyncError
from verl_sync_plugin.transport.agreement import ALONE, Ranks
from verl_sync_plugin.transport.joint import JointRanks
from verl_sync_plugin.transport.protocol import agreement_seconds

CUMEM = "NCCL_CUMEM_ENABLE"


@dataclass(frozen=True)
class Member:
    """One process, described by itself.

    Attributes:
        key: names the process.
        trainer: a trainer rank; else a rollout rank, in the process that verl puts next to an engine rank.
        place: its rank in the trainer, or in its replica.
        world: how many ranks the trainer or the replica has.
        device: names the GPU it computes on, on all hosts; empty on a CPU.
        group: name of the group that it is in; empty without one, and after a sync that failed for it.
        next_group: name of the group that is made if trainer rank 0 says so. No two of a run have one name: in the
            store, where ranks find each other, the second would find the addresses of the first.
        store: host and port of the store where all find each other; of trainer rank 0 only.
        cumem: its ``NCCL_CUMEM_ENABLE``.
    """

    key: str
    trainer: bool
    place: int
    world: int
    device: str
    group: str = ""
    next_group: str = ""
    store: tuple[str, int] | None = None
    cumem: str = ""

    def __str__(self) -> str:
        return f"{'trainer' if self.trainer else 'rollout'} rank {self.place} of {self.world}"


def topology(trainers: int, rollouts: int, members: Sequence[Member]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what verl hands to every process, by argument and rank: first the trainer's, then the rollout's, as in
    ``members``. Raises ValueError, which names them and the remedy, where two compute on one GPU, or their settings of
    NCCL differ."""
    _refuse_shared_devices(members)
    _refuse_mixed_cumem(members)
    everyone = tuple(members)
    ranks = list(range(trainers + rollouts))
    return (
        {"rank": ranks[:trainers], "members": [everyone] * trainers},
        {"rank": ranks[trainers:], "members": [everyone] * rollouts},
    )


def _refuse_shared_devices(members: Sequence[Member]) -> None:
    shared = [device for device, count in Counter(m.device for m in members if m.device).items() if count > 1]
    if shared:
        who = ", ".join(str(member) for member in members if member.device == shared[0])
        raise ValueError(
            f"actor_rollout_ref.rollout.checkpoint_engine.backend=sync_plugin: {who} compute on the same GPU "
            f"({shared[0]}), and NCCL cannot connect ranks that share one. Give the rollout GPUs of its own "
            "(actor_rollout_ref.rollout.nnodes and n_gpus_per_node), or set trainer.v1.trainer_mode=sync."
        )


def _refuse_mixed_cumem(members: Sequence[Member]) -> None:
    held = {member.cumem: str(member) for member in members if member.device}
    if len(held) > 1:
        which = "; ".join(f"{who} has {value or 'none'}" for value, who in sorted(held.items()))
        raise ValueError(
            f"{CUMEM} differs between the ranks of a weight sync ({which}), which makes NCCL hang or crash. Set it "
            "to one value for all of verl's processes (ray_kwargs.ray_init.runtime_env.env_vars)."
        )


class Membership:
    """This process among all that take part.

    Args:
        device: where it computes.
        trainer: it is a trainer rank; the ``first`` one keeps the store.
        timeout_seconds: how long a rank waits for what is its own; for each other as ``agreement_seconds`` says.

    Attributes:
        ranks: all members, while there is a group.
        own: of a trainer rank, the trainer's ranks among themselves; a rollout rank has nobody to settle with there.
        engine_ranks: those of this rank's engine in the group.
    """

    def __init__(self, device: torch.device, trainer: bool, first: bool, timeout_seconds: float) -> None:
        self._device = device
        self._trainer = trainer
        self._seconds = timeout_seconds
        self._key = uuid.uuid4().hex
        self._store: dist.TCPStore | None = None
        self._address: tuple[str, int] | None = None
        if first:
            host = ray.util.get_node_ip_address().strip("[]")
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self._address = host, self._store.port
        self._name = ""
        self._keys: tuple[str, ...] = ()  # of all in the group, by rank
        self.ranks: JointRanks | None = None
        self.own: Ranks = ALONE
        self.engine_ranks: tuple[int, ...] = ()

    def describe(self) -> Member:
        place, world = dist.get_rank(), dist.get_world_size()
        device = str(torch.cuda.get_device_properties(self._device).uuid) if self._device.type == "cuda" else ""
        cumem, named = os.environ.get(CUMEM, ""), (self._name, uuid.uuid4().hex)
        return Member(self._key, self._trainer, place, world, device, *named, self._address, cumem)

    def join(self, rank: int, members: tuple[Member, ...]) -> bool:
        """Collective over all members, in the order of their ranks: makes the group, unless it is there. Returns True
        if it is a new one. Raises RuntimeError where a member did not come in time."""
        if self._stands(members):
            return False
        self.leave()
        name = members[0].next_group
        if self._store is None:
            assert members[0].store is not None, "trainer rank 0 keeps the store"
            host, port = members[0].store
            bound = timedelta(seconds=agreement_seconds(self._seconds))
            self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=bound)
        trainers = sum(member.trainer for member in members)
        try:
            if rank < trainers:
                store = dist.PrefixStore(f"{name}/trainers", self._store)
                self.own = JointRanks(store, rank, trainers, 0, self._seconds, self._device)
            store = dist.PrefixStore(name, self._store)
            self.ranks = JointRanks(store, rank, trainers, len(members) - trainers, self._seconds, self._device)
        except BaseException:
            self.leave()  # others may have come through; with a member that is in no group all make another one
            raise
        me = members[rank]
        self.engine_ranks = () if me.trainer else tuple(range(rank - me.place, rank - me.place + me.world))
        self._name, self._keys = name, tuple(member.key for member in members)
        return True

    def _stands(self, members: tuple[Member, ...]) -> bool:
        """True if all members are in one group, and nobody else, who may be in one that the others have left."""
        groups = {member.group for member in members}
        return groups == {self._name} != {""} and self._keys == tuple(member.key for member in members)

    @contextmanager
    def taking_part(self, ranks: JointRanks | None) -> Iterator[None]:
        """Around this rank's part in a sync of ``ranks``, its group. Where it fails the next sync makes a new one: a
        broadcast of this one may be half done, and the next one would be taken for its rest. Afterwards nothing of
        NCCL's is left on the streams, where a broadcast that not all ranks have begun would hang.

        On an error that the ranks have not agreed on, this rank leaves the group at once, so that the others, which may
        wait for it, hear of that. On an agreed one it stays, for messages are still on their way.
        """
        try:
            yield
        except BaseException as error:
            if self.ranks is ranks:  # and not already that of a later sync
                self._name = ""
            if isinstance(error, SyncError) and not isinstance(error, RankLostError):
                if ranks is not None:
                    ranks.end_bytes()
            elif self.ranks is ranks:
                self.leave()
            elif ranks is not None:
                ranks.close()
            raise

    def leave(self) -> None:
        """Ends the group, if there is one; not collective."""
        if self.ranks is not None:
            self.ranks.close()
        self.own.close()
        self.ranks, self.own, self._name = None, ALONE, ""
