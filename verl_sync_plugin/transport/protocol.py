# SPDX-License-Identifier: Apache-2.0
"""The words on the wire, written down as a state machine. Imported by both sides; imports neither verl nor an engine.

    trainer rank                          engine rank (in its process)
    ------------                          ----------------------------
    LoadRequest (through a request of the engine's own)
                                    <---  connects to its trainer rank's address
    Hello(sync_id, digest, staging) --->
                                    <---  Ready(needs_plan), or Ready(unreachable) and the sync is over
    Manifest (only if needed)       --->
                                    <---  Used (only if asked for), and the sync is over if the trainer plans anew
    per bucket: Load(bucket, slot)  --->  loads, waits until its copies are done
                                    <---  Loaded(bucket) or Failed(text)
    or, where parameters are read where they lie (Hello(live) instead of staging):
                                    <---  Ready(needs_live), or Ready(unreachable) and the sync is over
    Whereabouts (only if needed)    --->
                                    <---  Ready, or Ready(unreachable) and the sync is over
    Load(ALL)                       --->  the same with everything at once
    Commit                          --->  proves coverage; lets go of staging memory if it is told to
                                    <---  Committed(coverage, sums) or Failed(text)
                                    <---  Proven (proof.py; only if asked for)

Either side may close at any time; the other then drops the sync. Addresses are of one sync. A slot may be
written again only after ``Loaded`` of the bucket that was in it, from every engine rank that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Entry, Plan
from verl_sync_plugin.transport.memory.exports import Live, StagingExport

MAGIC = "verl-sync-plugin"
PROTOCOL_VERSION = 14

# A trainer rank may spend up to three waits (its shards, its plan, its staging memory; or the last buckets, the commit,
# the engine's answer) before it meets the others, and who waits for it should hear why it failed instead of giving up
TOGETHER_WAITS, TOGETHER_SLACK_SECONDS = 3, 60.0
ALL = NONE = -1  # in place of a bucket: all of them at once; in place of a number: there is none

# Of what size, what is read of it, and the tensors that are so. Runs may overlap, and their targets are left out (0).
Readings = tuple[tuple[int, tuple[Run, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class LoadRequest:
    """Invites all ranks of one engine to a sync.

    Travels in a request of the engine's own, so it must consist of builtins that pass any unpickler (see
    ``rollouts/sglang/request.py``).

    Attributes:
        sync_id: names the sync in messages and logs.
        addresses: control channel of the trainer rank beside each tensor-parallel rank of the engine, in rank order.
        timeout_seconds: how long the loader waits for the next word; see also ``greeting_seconds``.
    """

    sync_id: str
    addresses: tuple[str, ...]
    timeout_seconds: float

    @property
    def greeting_seconds(self) -> float:
        """How long the loader waits for the first word: an engine that is awake comes while the trainer ranks gather
        and plan. One that dies or gives up closes the channel, which ends the wait at once."""
        return TOGETHER_WAITS * self.timeout_seconds + TOGETHER_SLACK_SECONDS

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


@dataclass(frozen=True)
class Hello:
    """Opens a sync.

    Attributes:
        sync_id: as in the request.
        digest: of the plan; the manifest is sent once per digest.
        stagings: where the slots are: of the trainer rank beside the engine rank, or of all ranks of its group; none
            when parameters are read where they lie.
        place: which of them is the one beside, or read for what all of them hold.
        homes: of a sharded plan, for each segment: in which of the stagings, and as which segment of a slot there.
        copy_plan: whether the receiver may replay copies instead of calling ``load_weights``.
        hashed: whether to hash what is read.
        whole: numbers of tensors to be hashed whole (see ``Readings``).
        live: keys of the ``Live`` of all ranks of the group, in place of stagings.
        tell_use: say, before anything is loaded, which bytes the model uses.
        own: which of the stagings, or of the ranks in ``live``, is on the engine rank's device; ``NONE``: none is.
        prove: say, behind ``Committed``, what lies in the parameters.
    """

    sync_id: str
    digest: str
    stagings: tuple[StagingExport, ...]
    place: int = 0
    copy_plan: bool = True
    hashed: bool = False
    whole: tuple[int, ...] = ()
    live: tuple[str, ...] = ()
    tell_use: bool = False
    own: int = 0
    homes: tuple[tuple[int, int], ...] = ()
    prove: bool = False


@dataclass(frozen=True)
class Ready:
    """``unreachable``: why the memory of trainer ranks cannot be read here in this way; then nothing follows."""

    needs_plan: bool = False
    unreachable: str = ""
    needs_live: bool = False


@dataclass(frozen=True)
class Whereabouts:
    """Where the parameters of all ranks of the group lie, in the order of ``Hello.live``."""

    lives: tuple[Live, ...]


@dataclass(frozen=True)
class Manifest:
    """What each bucket holds, in bucket order.

    Attributes:
        buckets: the tensors.
        worlds: number of segments.
        segments: bytes per segment.
        sharded: segments are in the slots of several ranks.
    """

    buckets: tuple[tuple[Entry, ...], ...]
    worlds: tuple[int, ...]
    segments: tuple[int, ...]
    sharded: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Manifest:
        return cls(
            tuple(bucket.entries for bucket in plan.buckets),
            tuple(bucket.world for bucket in plan.buckets),
            tuple(bucket.stride for bucket in plan.buckets),
            plan.sharded,
        )


@dataclass(frozen=True)
class Used:
    """What the engine's model does with the tensors of a manifest.

    Attributes:
        model: engine and class, such as "SGLang's LlamaForCausalLM".
        readings: which bytes of each tensor it uses; ``None`` when only the load itself will tell.
        layers: how many decoder layers the engine's model has; 0 when that is unknown.
        wider: of which it would take more than is sent: a dtype, and the numbers of the tensors; see
            ``Recording.wider``.
    """

    model: str
    readings: Readings | None
    layers: int = 0
    wider: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Load:
    bucket: int
    slot: int


@dataclass(frozen=True)
class Loaded:
    bucket: int
    seconds: float
    started: float  # by ``time.perf_counter``, the clock of the host that both processes are on


@dataclass(frozen=True)
class Commit:
    """Ends the sync. ``tell``: say in any case what is read of each tensor, which this trainer rank does not know.
    ``unmap``: let go of all staging memory, which the trainer gives back."""

    tell: bool = False
    unmap: bool = False


@dataclass(frozen=True)
class Coverage:
    """What the ledger of one engine rank found.

    Attributes:
        expected: number of parameters and persistent buffers of the engine's model.
        missing: names of those with bytes that the sync did not write, ``(name, written, total)`` in elements.
        buffers: names of those missing that are no parameters.
    """

    expected: int
    missing: tuple[tuple[str, int, int], ...]
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Committed:
    """What the engine rank did.

    Attributes:
        coverage: which bytes of the model were written.
        replayed_tensors: went by the copy plan instead of the model's ``load_weights``.
        replayed_bytes: their bytes.
        own_bytes: read from memory of the rank beside, on the engine rank's own device.
        peer_bytes: read from other ranks' memory.
        sums: the hash of what was read of each tensor, as little-endian int64; empty without hashing.
        readings: which bytes these are; ``None`` when they are those of the last time.
        obstacle: why the next sync of this plan may not have this rank read parameters where they lie; empty when it
            may.
        used: what the model used, where that is unknown to the trainer rank; else ``None``.
        activation_bytes: the most device memory that the engine allocated beyond what it keeps since the last sync; 0
            when unknown, as in the first.
    """

    coverage: Coverage
    replayed_tensors: int = 0
    replayed_bytes: int = 0
    own_bytes: int = 0
    peer_bytes: int = 0
    sums: bytes = b""
    readings: Readings | None = None
    obstacle: str = ""
    activation_bytes: int = 0
    used: Used | None = None


@dataclass(frozen=True)
class Failed:
    """The receiver could not go on; ``text`` says why."""

    text: str
