"""The words on the wire, written down as a state machine. Imported by both sides; imports neither verl nor SGLang.

    trainer rank                          SGLang scheduler rank (inside the loader)
    ------------                          -----------------------------------------
    LoadRequest (through SGLang's update_weights_from_tensor)
                                    <---  connects to its trainer rank's address, Join(sync_id)
    Hello(sync_id, digest, staging) --->
                                    <---  Ready(needs_plan)
    Manifest (only if needed)       --->
    per bucket: Load(bucket, slot)  --->  loads, waits until its copies are done
                                    <---  Loaded(bucket) or Failed(text)
    Commit(sums)                    --->  compares what it read with what was sent
                                    <---  Committed(coverage) or Failed(text)

Either side may close at any time; the other then drops the sync. A Join of another sync is a latecomer: an engine rank
that was held up until its sync had been given up; the trainer rank closes it. A slot may be written again only after
``Loaded`` of the bucket that was in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from verl_sync_plugin.bucket import Bucket, Entry

MAGIC = "verl-sync-plugin"
PROTOCOL_VERSION = 2
LOADER = "verl_sync_plugin.receiver.loader.load"


@dataclass(frozen=True)
class LoadRequest:
    """Invites all scheduler ranks of one engine to a sync.

    Travels in the name slot of ``update_weights_from_tensor``, so it must consist of builtins that pass SGLang's
    ``SafeUnpickler``.

    Attributes:
        sync_id: names the sync in messages and logs.
        addresses: control channel of the trainer rank beside each tensor-parallel rank of the engine, in rank order.
        timeout_seconds: how long the loader waits for the next word.
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
                "Trainer and SGLang must run the same version of verl-sync-plugin."
            )
        return cls(*header[2:])


@dataclass(frozen=True)
class StagingExport:
    """How to open the sender's staging memory.

    Attributes:
        kind: ``cuda_ipc`` or ``shared_memory``.
        key: changes whenever the memory behind it does; the receiver opens each key once.
        nbytes: size of all slots together.
        slot_bytes: size of one slot.
        handle: what the mechanism needs, builtins only.
    """

    kind: str
    key: str
    nbytes: int
    slot_bytes: int
    handle: tuple[Any, ...]


@dataclass(frozen=True)
class Join:
    sync_id: str


@dataclass(frozen=True)
class Hello:
    """Opens a sync.

    Attributes:
        sync_id: as in the request.
        digest: of the plan; the manifest is sent once per digest.
        staging: where the slots are.
        copy_plan: whether the receiver may replay copies instead of calling ``load_weights``.
        hashed: whether the senders hash what they pack.
    """

    sync_id: str
    digest: str
    staging: StagingExport
    copy_plan: bool = True
    hashed: bool = False


@dataclass(frozen=True)
class Ready:
    needs_plan: bool


@dataclass(frozen=True)
class Manifest:
    """What each bucket holds, in bucket order.

    Attributes:
        buckets: the tensors.
        worlds: number of segments.
        segments: bytes per segment.
    """

    buckets: tuple[tuple[Entry, ...], ...]
    worlds: tuple[int, ...]
    segments: tuple[int, ...]

    @classmethod
    def of(cls, buckets: Sequence[Bucket]) -> Manifest:
        return cls(
            tuple(bucket.entries for bucket in buckets),
            tuple(bucket.world for bucket in buckets),
            tuple(bucket.stride for bucket in buckets),
        )


@dataclass(frozen=True)
class Load:
    bucket: int
    slot: int


@dataclass(frozen=True)
class Loaded:
    bucket: int
    seconds: float


@dataclass(frozen=True)
class Commit:
    """``sums``: the hash of every segment as its rank sent it, by bucket and segment; empty without hashing."""

    sums: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Coverage:
    """What the ledger of one scheduler rank found.

    Attributes:
        expected: number of parameters and persistent buffers of the engine's model.
        missing: names of those with bytes that the sync did not write, ``(name, written, total)`` in elements.
    """

    expected: int
    missing: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Committed:
    """``replayed_*``: what went by the copy plan instead of the model's ``load_weights``."""

    coverage: Coverage
    replayed_tensors: int = 0
    replayed_bytes: int = 0


@dataclass(frozen=True)
class Failed:
    """The receiver could not go on; ``text`` says why."""

    text: str


def describe(message: Any) -> str:
    """A short form for logs and errors."""
    fields = {key: value for key, value in asdict(message).items() if key != "buckets"}
    return f"{type(message).__name__}({str(fields)[:200]})"
