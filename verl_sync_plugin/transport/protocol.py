# SPDX-License-Identifier: Apache-2.0
"""The words on the wire, written down as a state machine. Imported by both sides; imports neither verl nor an engine.

    trainer rank                          engine rank (in its process)
    ------------                          ----------------------------
    LoadRequest (through a request of the engine's own)
                                    <---  connects to its trainer rank's address
    Hello(digest, staging)          --->  finds out what its model does with the tensors, if that is new
                                    <---  Ready(map; if it is new), and the sync is over if the trainer plans again;
                                          Ready(refusal), and the sync is over; or Ready(needs_details)
    Hello once more, with manifest  --->  (if needed)
                                    <---  Ready(map)
    per bucket: Load(bucket, slot)  --->  loads, waits until its copies are done
                                    <---  Loaded(bucket) or Failed(text)
    or, in place, Hello(location_keys, and if needed locations), and
    Load(ALL)                       --->  the same with everything at once
    Commit                          --->  lets go of staging memory if asked for
                                    <---  Committed(sums, what is held if asked for) or Failed(text)

Either side may close at any time; the other then drops the sync. Addresses are of one sync. A slot may be
written again only after ``Loaded`` of the bucket that was in it, from every engine rank that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from verl_sync_plugin.layout.load_map import LoadMap
from verl_sync_plugin.layout.tensors import Bucket, Plan
from verl_sync_plugin.transport.memory import Location, Slots

MAGIC = "verl-sync-plugin"
PROTOCOL_VERSION = 25

ALL = -1  # in place of a bucket: all of them at once


def agreement_seconds(timeout_seconds: float) -> float:
    """Seconds that ranks wait for each other, of which each may wait ``timeout_seconds`` for something else.

    A trainer rank may spend up to three waits (its shards, its plan, its staging memory; or the last buckets, the
    commit, the engine's answer) before it meets the others, and who waits for it should hear why it failed instead of
    giving up."""
    return 3 * timeout_seconds + 60.0


@dataclass(frozen=True)
class LoadRequest:
    """Invites all ranks of one engine to a sync.

    Travels in a request of the engine's own, so it must consist of builtins that pass any unpickler (see
    ``rollouts/sglang/request.py``).

    Attributes:
        sync_id: names the sync in messages and logs.
        addresses: for each tensor-parallel rank of the engine, in order, the control channel of its trainer rank.
        timeout_seconds: how long the loader waits for the next word. For the first it waits ``agreement_seconds``: an
            awake engine comes while the trainer ranks gather and plan. One that dies or gives up closes the channel,
            which ends the wait at once.
    """

    sync_id: str
    addresses: tuple[str, ...]
    timeout_seconds: float

    def to_wire(self) -> tuple[Any, ...]:
        return (MAGIC, PROTOCOL_VERSION, self.sync_id, tuple(self.addresses), float(self.timeout_seconds))

    @classmethod
    def from_wire(cls, header: Any) -> LoadRequest:
        """Raises ValueError when ``header`` is not a request of this protocol version."""
        if not isinstance(header, tuple) or len(header) != 5 or header[:2] != (MAGIC, PROTOCOL_VERSION):
            raise ValueError(
                f"not a request of weight-sync protocol {PROTOCOL_VERSION}: {str(header)[:200]}. "
                "Trainer and engine must run the same version of verl-sync-plugin."
            )
        return cls(*header[2:])


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Opens a sync.

    Attributes:
        digest: of the plan; the manifest is sent once per digest.
        stagings: where the slots are: of the trainer rank on its GPU or, of a sharded plan, of all ranks of its group,
            one for each segment; none when parameters are read where they lie.
        place: index in ``stagings`` or ``locations`` of the rank from which is read what all of them hold: the paired
            one, if listed.
        location_keys: keys of the ``Location`` of all ranks of the group, in place of stagings.
        asks_hashes: say in ``Committed`` what lies in the parameters.
        map: names the ``LoadMap`` that the trainer rank knows; another one is said in ``Ready``.
        manifest: what ``digest`` names, where the engine rank lacks it.
        locations: what ``location_keys`` names, in its order, where the engine rank lacks it.
    """

    digest: str
    stagings: tuple[Slots, ...]
    place: int
    location_keys: tuple[str, ...] = ()
    asks_hashes: bool = False
    map: str = ""
    manifest: Manifest | None = None
    locations: tuple[Location, ...] = ()


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Answers ``Hello``.

    Attributes:
        refusal: why this engine rank cannot follow the chosen delivery; then nothing follows.
        needs_details: say ``Hello`` once more, with the manifest or with what ``location`` names.
        map: what the model does with the tensors, if the trainer rank does not know it.
    """

    refusal: str = ""
    needs_details: bool = False
    map: LoadMap | None = None


@dataclass(frozen=True)
class Manifest:
    """The contents of each bucket, in bucket order.

    Attributes:
        buckets: those of the plan, without their slices.
        sharded: segments are in the slots of several ranks.
    """

    buckets: tuple[Bucket, ...]
    sharded: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Manifest:
        return cls(tuple(replace(bucket, slices=()) for bucket in plan.buckets), plan.sharded)


class Load(msgspec.Struct, frozen=True, tag=True):
    bucket: int
    slot: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    bucket: int
    seconds: float
    started: float  # by ``time.perf_counter``, the clock of the host that both processes are on


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Ends the sync. ``unmap``: let go of all staging memory, which the trainer gives back."""

    unmap: bool = False


@dataclass(frozen=True)
class Held:
    """Hashes of the parameters of an engine rank after a sync.

    Attributes:
        sums: the hash of each of ``load_map.held_parts``, as little-endian int64.
        changed: tensors of the model in which a constant, or an element in a wider dtype, has other bits than a load
            leaves.
    """

    sums: bytes
    changed: tuple[str, ...] = ()


class Committed(msgspec.Struct, frozen=True, tag=True):
    """Reports what the engine rank did.

    Attributes:
        replayed_tensors: went by copies instead of the model's ``load_weights``.
        sums: the hash of each of ``load_map.read_parts``, as little-endian int64.
        obstacle: why the next sync of this plan may not have this rank read parameters where they lie; empty when it
            may.
        activation_bytes: the most device memory that the engine allocated beyond what it keeps since the last sync; 0
            when unknown, as in the first.
        held: what lies in the parameters; ``None`` where that was not asked for.
    """

    replayed_tensors: int = 0
    sums: bytes = b""
    obstacle: str = ""
    activation_bytes: int = 0
    held: Held | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The receiver could not go on; ``text`` says why."""

    text: str


MESSAGES = Hello | Ready | Load | Loaded | Commit | Committed | Failed
