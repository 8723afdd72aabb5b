# SPDX-License-Identifier: Apache-2.0
"""The deliveries of bytes from trainer ranks to engine ranks, and the choice between them.

in place    from the second sync on engine ranks read parameters where they lie; nothing is packed
staged      every rank packs its segment of a bucket into a slot of its staging memory, and the bucket is moved:
            by nothing, where all engine ranks can map the slots that they read (``staged``), or by a broadcast of
            each segment from the rank that packed it into the slots of all ranks (``broadcast``), which crosses
            every host boundary once

The first sync is staged: an engine rank says at its end whether it can read in place. While one bucket is loaded, the
next ones are moved and packed. All ranks settle once per bucket: then it is packed everywhere, and the slot of the
bucket before the last has been read everywhere. A rank whose slots only its engine rank reads packs two buckets ahead
instead of one.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from verl_sync_plugin.config.settings import KEY_PREFIX, SyncConfig
from verl_sync_plugin.errors import RankLostError, SyncError
from verl_sync_plugin.layout.tensors import SCALE_SUFFIX, Plan, Shard
from verl_sync_plugin.log import say
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync.sender import SLOTS, BucketSender
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.joint import JointRanks
from verl_sync_plugin.transport.memory import Location, NotInPlaceError, ParameterLocator, Slots
from verl_sync_plugin.transport.protocol import ALL, Committed, Hello, Ready

AHEAD = SLOTS - 1  # buckets between the one handed over and the last one that every engine rank has surely read
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DeliveryRefusedError(RuntimeError):
    """An engine rank cannot follow the chosen delivery, such as by mapping memory; the same text on every rank."""


@dataclass(frozen=True, eq=False)
class Sync:
    """One sync under way, of which all ranks have the same plan.

    Attributes:
        source: what prepares the shards.
        shards: all shards of this rank, by base index.
        senders: the ranks whose segments make up a bucket for this rank's engine rank, in their order.
        verified: what lies in the engine's parameters is to be compared with what is sent.
        keeps_staging: staging memory stays for the next sync.
    """

    plan: Plan
    source: ParameterSource
    shards: list[Shard]
    report: SyncReport
    senders: tuple[int, ...]
    verified: bool = False
    keeps_staging: bool = True


class Reach:
    """Knows which memory engine ranks can map: that of the ranks of their host.

    Attributes:
        sharded: engine ranks read segments from several ranks, so plans are sharded; ``None`` until it is decided.
        why: the reason why plans are not sharded.
    """

    sharded: bool | None = None
    why = "no ranks share out the model"

    def decide(self, agreement: Agreement, sharing: tuple[int, ...], who: str) -> None:
        """Collective, once. ``sharing``: the ranks of which this rank's engine rank would read segments, which is one
        that holds everything where there are no others; ``who``: what they are called in messages."""
        self.sharded = False
        if len(sharing) > 1:
            everywhere = agreement.gather("finding out which ranks share a host", (host_name(), sharing))
            self.sharded = all(len({everywhere[rank][0] for rank in ranks}) == 1 for _, ranks in everywhere)
            self.why = f"{who} are on several hosts"


class Delivery(ABC):
    """Lives as long as the run. For each sync the ranks vote for one; then all of them call ``fill``, ``handshake`` and
    ``run``. What is collective raises SyncError on all ranks where any has failed. Arguments are those of
    ``Deliveries``, and its ``reach``."""

    name: str
    filling: str  # the stage that ranks settle
    _sources: tuple[int, ...] = ()  # the ranks whose memory this rank's engine rank reads
    _stagings: tuple[Slots, ...] = ()  # where their slots are
    _locations: tuple[Location, ...] = ()  # or their parameters

    def __init__(self, agreement: Agreement, sender: BucketSender, own: Agreement, reach: Reach) -> None:
        self._agreement, self._sender, self._own, self._reach = agreement, sender, own, reach
        ranks = agreement.ranks
        self._me, self._packs, self._loads = ranks.rank, ranks.rank in ranks.trainers, ranks.rank in ranks.rollouts
        # Trainer and rollout share no process: a rank then packs, or has an engine rank load
        self._separate = not (self._packs and self._loads)

    def fill(self, sync: Sync) -> None:
        """Collective: starts to bring the first bytes into place; the engine may still be asleep."""
        if self._packs:
            self._begin(sync)
            if sync.source.prepares and not self._separate:  # of those that are, ``_prepare`` has settled
                self._agreement.settle(self.filling)

    @abstractmethod
    def _begin(self, sync: Sync) -> None:
        """Does what ``fill`` is, on a rank that packs."""

    def handshake(self, sync: Sync, known: str) -> Ready:
        """Opens the sync with this rank's engine rank, whose channel the sender has adopted; not collective. ``known``
        names the ``LoadMap`` that is known of it. Raises RuntimeError or OSError where it is gone, silent or fails."""
        me, sources = self._me, self._sources
        # What all hold is read from its own trainer rank; where that is none of them, the ranks share them out
        place = sources.index(me) if me in sources else me % len(sources)
        hello = Hello(
            sync.plan.digest, self._stagings, place,
            tuple(location.key for location in self._locations), sync.verified, known,
        )  # fmt: skip
        return self._sender.handshake(hello, sync.plan, self._locations)

    @abstractmethod
    def run(self, sync: Sync) -> None:
        """Collective: hands everything over. When it returns, this rank's engine rank has read everything, or this
        rank has failed."""

    @abstractmethod
    def fall_back(self, error: DeliveryRefusedError) -> None:
        """Has the next sync take another delivery."""

    def _load(self, index: int, slot: int) -> None:
        if self._loads:
            self._sender.load(index, slot)

    def _wait(self, sync: Sync, index: int) -> None:
        """Waits until the engine rank has loaded a bucket; not where this rank has failed, or has none."""
        if self._agreement.failed or not self._loads:
            return
        with sync.report.stage("wait_engine"):
            loaded = self._sender.wait_loaded(index)
        sync.report.note_stage("engine_load", loaded.started, loaded.seconds)

    def _prepare(self, sync: Sync, bases: tuple[int, ...], ahead: Sequence[tuple[int, ...]], what: str) -> None:
        """Collective over the trainer's ranks: has the source compute what these bases need. ``what``: the stage that
        ranks settle next."""
        if not sync.source.prepares:
            return
        # Where they are separate, an error of all trainer ranks is news for the rollout ranks
        with self._agreement.attempt() if self._separate else nullcontext(), sync.report.stage("prepare"):
            if self._separate and self._agreement.failed:  # the others must not wait for this rank alone
                with self._own.attempt():
                    raise RuntimeError("this rank has failed before")
            self._own.run(what, sync.source.prepare(bases, ahead))
            if self._separate:
                self._own.settle(what)

    def check_finite(self) -> None:
        """The last word before the commit, so that the engine does not generate from a NaN that it was given. Raises
        ValueError, with parameter and remedy, where this rank has packed NaN or Inf."""
        if self._packs and (names := self._sender.broken()):
            raise ValueError(
                f"parameter {names[0].removesuffix(SCALE_SUFFIX)!r} holds NaN or Inf in the trainer, or exceeds the "
                "range of the dtype in which it travels, so the engine generates nothing from this sync. Look at the "
                "last optimizer step (loss, gradient norm, learning rate)"
            )


class InPlace(Delivery):
    """Engine ranks read parameters where they lie, all at once, by a few launches of the copy kernel. Only where an
    engine rank has said that its load map covers everything, every trainer rank can tell where its parameters are, and
    every engine rank can map them. What cannot be read so (merged adapters, offloaded parameters, a model that loads
    the tensors itself) is staged.

    Attributes:
        ruled_out: why the user has all parameters staged; empty where they are not.
        announced: the key by which the others know where this rank's parameters lie; empty at first.
    """

    name, filling = "in place", "finding the scales"
    ruled_out = announced = ""
    _engine_obstacle = "the engine has not yet said that it can"  # why the engine rank cannot
    _readable_plan = ""  # the plan of which the engine rank said that it can
    _said = ""
    _parameters: ParameterLocator | None = None
    _location: Location | None = None

    def obstacle(self, sync: Sync) -> str:
        """Looks where the parameters are; returns why this rank has to stage them, or nothing. Not collective."""
        if self.ruled_out or self._readable_plan != sync.plan.digest:
            return self.ruled_out or self._engine_obstacle
        if not self._packs:
            return ""
        try:
            if (self._separate or len(sync.senders) > 1) and not sync.plan.sharded:
                raise NotInPlaceError(self._reach.why)
            if not sync.source.readable_in_place:
                raise NotInPlaceError("what travels is made for each sync, or may be")
            if self._parameters is None or self._parameters.plan is not sync.plan:
                self._parameters = ParameterLocator(self._sender.device, sync.plan, sync.source.rank)
            self._location = self._parameters.locate(sync.shards)
        except NotInPlaceError as error:
            self._say(str(error))
            return str(error)
        return ""

    def _say(self, why: str) -> None:
        if why != self._said:
            say(f"parameters are staged, not read where they lie: {why}")
        self._said = why

    def _begin(self, sync: Sync) -> None:
        """Waits until parameters are final, and starts to hash and check them: as early as possible, so that it is done
        before the engine needs the device. Before that it finds the scales of what engine ranks quantize."""
        self._prepare(sync, tuple(range(len(sync.plan.bases))), (), self.filling)
        with self._agreement.attempt():
            assert self._parameters is not None, "looked up"
            self._sender.begin(sync.plan, sync.source.rank)
            self._sender.hash_parameters(sync.shards, self._parameters.found)

    @property
    def unannounced(self) -> bool:
        """True if the other ranks do not know where this rank's parameters lie."""
        mine = self._location
        return mine is not None and mine.key != self.announced if self._packs else not self._locations

    def tell(self, sync: Sync) -> None:
        """Collective: the trainer's ranks tell where their parameters lie."""
        everywhere = self._agreement.gather("telling where parameters lie", self._location)
        found = [everywhere[rank] for rank in sync.senders]
        self._locations, self._sources = tuple(each for each in found if each is not None), sync.senders
        assert len(self._locations) == len(found), "looked up on all ranks"
        self.announced = self._location.key if self._location is not None else ""

    def run(self, sync: Sync) -> None:
        """Has the engine rank load everything at once."""
        with self._agreement.attempt():
            self._load(ALL, 0)
            self._wait(sync, ALL)

    def note(self, committed: Committed | None, plan: Plan) -> None:
        """Takes in whether the engine rank could read the next sync in place; where this rank has none,
        only others have something to say against it."""
        obstacle = committed.obstacle if committed is not None else ""
        self._readable_plan = "" if obstacle else plan.digest
        self._engine_obstacle = obstacle or InPlace._engine_obstacle
        if obstacle and not self.ruled_out:
            self._say(obstacle)

    def fall_back(self, error: DeliveryRefusedError) -> None:
        """As long as an engine rank says that it cannot map them, parameters are staged."""
        self._readable_plan = ""
        say(f"an engine rank cannot read parameters where they lie ({error}); they are staged instead")


class Staged(Delivery):
    """Buckets are packed into slots, and engine ranks read them there. A byte that an engine rank does not need is
    never moved to it where the slots are mapped, and what its own trainer rank holds never leaves the GPU."""

    name, filling = "staged", "packing the first buckets"
    _staged_plan = ""  # the digest of the plan that the staging memory is for
    _broadcasts = False

    def needs_staging(self, sync: Sync) -> bool:
        """True if ``stage`` has to come first."""
        return self._staged_plan != sync.plan.digest or (self._holds(sync.plan) and not self._sender.staging_bytes)

    def _holds(self, plan: Plan) -> bool:
        """True if this rank has slots."""
        return self._packs or not plan.sharded

    def stage(self, sync: Sync) -> None:
        """Collective: makes staging memory for the plan; each rank hears of what its engine rank will read."""
        self._staged_plan, plan = "", sync.plan  # what was there is gone even if this fails
        sources = sync.senders if plan.sharded else (self._me,)
        mine = self._agreement.step(
            "making the staging memory", lambda: self._sender.reserve(plan) if self._holds(plan) else None
        )
        everywhere = self._agreement.gather("exchanging the staging memory", mine) if plan.sharded else {self._me: mine}
        held = (everywhere[rank] for rank in sources if self._loads)
        self._stagings = tuple(slots for slots in held if slots is not None)
        self._sources, self._staged_plan = sources, plan.digest
        self._broadcasts = not plan.sharded and (self._separate or any(bucket.world > 1 for bucket in plan.buckets))
        self.name = "broadcast" if self._broadcasts else "staged"

    def _begin(self, sync: Sync) -> None:
        """Fills all slots."""
        with self._agreement.attempt():
            self._sender.begin(sync.plan, sync.source.rank)
        for index in range(min(SLOTS, len(sync.plan.buckets))):
            self._fill(sync, index, self.filling)

    def _fill(self, sync: Sync, index: int, what: str) -> None:
        """A rank that packs starts to bring one bucket into its slot; ``what`` as for ``_prepare``."""
        if not self._packs:
            return
        buckets = sync.plan.buckets
        self._prepare(sync, buckets[index].bases, [later.bases for later in buckets[index + 1 :]], what)
        with self._agreement.attempt(), sync.report.stage("pack"):
            self._sender.pack(index, index % SLOTS, sync.shards)

    def run(self, sync: Sync) -> None:
        """Hands all buckets over. A rank that has failed says so before anything is moved, so nobody waits for its
        bytes; and what is under way is awaited before a rank gives up, so that nothing of a failed sync comes into a
        later one."""
        try:
            self._run(sync)
        except BaseException as error:
            # What is under way from a rank that is lost never comes
            if self._broadcasts and not isinstance(error, RankLostError):
                for slot in range(SLOTS):
                    with suppress(Exception):
                        self._sender.drain(slot)
                if isinstance(error, SyncError):
                    # All ranks raise it, and none goes on to end its transfers before all have awaited theirs
                    with suppress(SyncError):
                        self._agreement.settle("awaiting what was under way")
            raise

    def _run(self, sync: Sync) -> None:
        count, lag = len(sync.plan.buckets), int(self._broadcasts)  # what is broadcast is loaded one round later
        alone = not (sync.plan.sharded or self._broadcasts)  # only this rank's engine rank reads its slots
        ahead = 1 if alone else AHEAD
        packing = [f"packing bucket {index + 1} of {count}" for index in range(count)]
        for index in range(count + lag):
            with self._agreement.attempt():
                if index >= AHEAD and not alone:
                    self._wait(sync, index - AHEAD)
            if index < count:
                with self._agreement.attempt(), sync.report.stage("drain"):
                    self._sender.drain(index % SLOTS)
                with sync.report.stage("settle"):
                    self._agreement.settle(packing[index])
            if index < count and self._broadcasts:
                with self._agreement.attempt():
                    self._broadcast(sync, index)
            with self._agreement.attempt():
                if lag and index > 0:
                    with sync.report.stage("move"):
                        self._sender.drain((index - 1) % SLOTS)
                if index >= lag and not self._agreement.failed:
                    self._load(index - lag, (index - lag) % SLOTS)
                if alone and index > 0:  # the engine rank has the next bucket by now, so that it does not idle
                    self._wait(sync, index - 1)
            if ahead <= index < count - (SLOTS - ahead):
                self._fill(sync, index + SLOTS - ahead, packing[index + 1])
        with self._agreement.attempt():
            for index in range(max(count + lag - ahead, 0), count):
                self._wait(sync, index)

    def _broadcast(self, sync: Sync, index: int) -> None:
        """Starts to complete a bucket's slot on all ranks."""
        bucket, ranks = sync.plan.buckets[index], self._agreement.ranks
        if isinstance(ranks, JointRanks):
            start = ranks.broadcast
        elif bucket.world > 1:
            start = partial(dist.broadcast, group=sync.source.group, async_op=True)
        else:
            return  # every rank has packed all of it
        self._sender.broadcast(bucket, index % SLOTS, sync.senders, start)

    def fall_back(self, error: DeliveryRefusedError) -> None:
        if not self._reach.sharded:
            raise SyncError(
                f"an engine rank cannot read the memory of the rank next to it ({error}). Start both in one container, "
                "or with one IPC namespace, and let both see the same GPUs; verl-sync doctor tries it."
            ) from error
        say(f"an engine rank cannot read other ranks' memory ({error}); buckets are broadcast instead")
        self._reach.sharded, self._reach.why = False, str(error)


class Deliveries:
    """Both, of which the ranks choose one in every sync: an engine rank learns what it can, and a trainer may move its
    parameters. Arguments are as in ``ShardingManager``; ``reach`` decides how plans are laid out."""

    def __init__(
        self, config: SyncConfig, agreement: Agreement, sender: BucketSender, own: Agreement | None = None
    ) -> None:
        self._agreement, self.reach = agreement, Reach()
        shared = agreement, sender, own or agreement, self.reach
        self.in_place, self.staged = InPlace(*shared), Staged(*shared)
        if config.delivery == "staged":
            self.in_place.ruled_out = f"{KEY_PREFIX}.delivery=staged"
        self._why = self._said = ""  # why this rank has to stage, and the delivery that was said last
        self._chosen: Delivery = self.staged

    def votes(self, sync: Sync) -> list[int]:
        """Returns this rank's votes, to be added up over all ranks for ``take``. Not collective."""
        self._why = self.in_place.obstacle(sync)
        return [bool(self._why), not self._why and self.in_place.unannounced, self.staged.needs_staging(sync)]

    def take(self, sync: Sync, votes: Sequence[int]) -> Delivery:
        """Collective: the delivery of this sync, ready to ``fill``; ``votes`` are those of all ranks, added up."""
        impossible, unannounced, needs_staging = map(bool, votes)
        if impossible:
            if needs_staging:
                self.staged.stage(sync)
        elif unannounced:
            self.in_place.tell(sync)
        self._chosen = self.staged if impossible else self.in_place
        if self._chosen.name != self._said and self._agreement.ranks.rank == 0:
            why = [] if not impossible else [f"not in place: {self._why or 'another rank cannot; its log says why'}"]
            if self._chosen.name == "broadcast":
                why.append(f"slots cannot be read where they were packed: {self.reach.why}")
            say(f"delivery is {self._chosen.name}" + (f" ({'; '.join(why)})" if why else ""))
        self._said = self._chosen.name
        return self._chosen

    def fall_back(self, error: DeliveryRefusedError) -> None:
        """The delivery chosen last was out of reach: the next sync takes another one."""
        self._chosen.fall_back(error)


def ranks_of(group: dist.ProcessGroup | None, alone: int) -> tuple[int, ...]:
    """The ranks of a group, or the one that holds everything ``alone``."""
    return (alone,) if group is None else tuple(dist.get_process_group_ranks(group))


def host_name() -> str:
    """Equal for processes that can share memory: one machine, one container."""
    return f"{socket.gethostname()} {BOOT_ID.read_text() if BOOT_ID.exists() else ''}".strip()
