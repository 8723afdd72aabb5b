# SPDX-License-Identifier: Apache-2.0
"""Proves that the engine takes in what the trainer sends: all of it, unchanged, and into every parameter.

What the engine ranks do with the tensors of a plan is said once, by their ``LoadMap``. From these follows, before
anything is sent, that every byte is used and every parameter is written. In every sync the engine ranks hash what they
read, part by part, and in a verified one also what then lies in their parameters. The hash is linear
(``copies/plain.py``), so the trainer ranks multiply each part's hash: all bytes of a tensor then count equally often,
and one sum over all ranks compares all copies of all bytes with what was packed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from verl_sync_plugin.config.settings import KEY_PREFIX, TURN_OFF, SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.load_map import (
    UNEVEN,
    HashedPart,
    LoadMap,
    StateTensor,
    Tensors,
    hash_factors,
    held_parts,
    read_parts,
    unused,
    unwritten,
    wire_dtypes,
)
from verl_sync_plugin.layout.tensors import SCALE_SUFFIX, Plan
from verl_sync_plugin.log import say, some
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import Committed

FIRST_SYNCS = 3  # verified by ``custom.sync.verify=first``
FORMAT_KEY = "actor_rollout_ref.rollout.load_format"  # verl's
DERIVED = "what the model computes from parameters after its load"


class Comparison:
    """Compares hashes on one trainer rank. Keeps all engine ranks' load maps, which change only with the tensors or
    with the layout of an engine's parameters.

    Args:
        config: for messages.
        agreement: where ranks settle.
        ranks: those paired with the ranks of this rank's engine; none where it has no engine.
        real_weights: as in ``RolloutEndpoint``.

    Attributes:
        map: of this rank's engine rank.
        compared: numbers of the tensors that are compared wherever they lie in the engine.
        left_out: by name, tensors that are not on every engine rank, with the reason.
        tensor_count, unwritten: how many parameters and buffers its model has, and those that no sync writes whole.
        blocks: of tensors to be sent in fp8, by name, rows and columns of a block.
    """

    def __init__(self, config: SyncConfig, agreement: Agreement, ranks: Sequence[int], real_weights: bool) -> None:
        self._config, self._agreement = config, agreement
        self._ranks, self._real = tuple(ranks), real_weights
        self._known = ""  # digest of the plan of which all ranks know the maps, as far as this rank has heard
        self._maps: dict[str, LoadMap] = {}  # by digest
        self._said = set[str]()
        self.map: LoadMap | None = None
        self._digest = ""  # of it
        self.compared: tuple[int, ...] = ()
        self.left_out: dict[str, str] = {}
        self.tensor_count, self.unwritten = 0, list[tuple[StateTensor, int, int]]()
        self.blocks: dict[str, tuple[int, int]] = {}

    def knows(self, plan: Plan) -> bool:
        """True if the maps for a plan are known. Ranks may differ, after a failure."""
        return plan.digest == self._known

    def note(self, found: LoadMap) -> None:
        """Keeps what this rank's engine rank says."""
        self.map, self._digest, self._known = found, found.digest, ""

    def learn(self, plan: Plan) -> dict[str, str]:
        """Collective: exchanges the maps, and raises SyncError, with the same text on every rank, for a plan of which
        bytes are used by no rank of an engine, or that leaves a parameter unwritten. Returns ``wire_dtypes``, the same
        on every rank. A plan of which the engine wants some in fp8 stays unknown."""
        self._known = ""
        digests = self._exchange()
        maps = [self._maps[digest] for digest in digests if digest]
        tensors = Tensors([bucket.entries for bucket in plan.buckets])
        if blocks := {tensors.names[number]: (rows, columns) for each in maps for number, rows, columns in each.fp8}:
            self.blocks |= blocks
            return {}
        self._agreement.step("checking what the engine uses", lambda: self._refuse(tensors, digests))
        self._agreement.step("weighing what the engine holds", lambda: self._find_factors(plan, tensors, digests))
        self._known = plan.digest
        return wire_dtypes(tensors.names, maps)

    def _exchange(self) -> list[str]:
        """The digest of every rank's map, if it has one; takes in the maps, of equal ones only one."""
        digests: list[str] = self._agreement.gather("exchanging what the engine does", self._digest)
        if not all(each in self._maps for each in digests if each):
            mine = self._digest and digests.index(self._digest) == self._agreement.ranks.rank
            packed = msgspec.msgpack.encode(self.map) if mine else b""
            everyone = zip(digests, self._agreement.gather("exchanging the engine's load maps", packed), strict=True)
            self._maps = {each: msgspec.msgpack.decode(found, type=LoadMap) for each, found in everyone if found}
        return digests

    def _refuse(self, tensors: Tensors, digests: Sequence[str]) -> None:
        """Raises ValueError or RuntimeError where this rank's engine leaves out a tensor or a parameter."""
        if not self._ranks:
            return
        names, maps = tensors.names, [self._maps[digests[rank]] for rank in self._ranks]
        if found := unused({name: tensors.entries[name] for name in names}, tensors.owners, maps):
            shown = some([f"{names[number]} ({lacks} of {of} bytes)" for number, lacks, of in found])
            if all(names[number].endswith(SCALE_SUFFIX) for number, *_ in found):
                raise ValueError(
                    f"{maps[0].model} drops the scales of {len(found)} weights that it keeps in fp8: {shown}. "
                    f"It would compute with random ones, and so it would with stock verl, which does "
                    "not notice. Remove actor_rollout_ref.rollout.quantization=fp8, or use another model."
                )
            raise ValueError(
                f"{maps[0].model} leaves out {len(found)} of the {len(names)} tensors that the trainer sends: "
                f"{shown}. It would generate from other weights than are trained, and so it "
                "would with stock verl, which raises no error. Use a model that the engine takes in whole; or, if what "
                f"is left out does not matter, {TURN_OFF}."
            )
        if self.map is not None:
            self.tensor_count, self.unwritten = sum(len(s.tensors) for s in self.map.storages), unwritten(self.map)
            self._refuse_unwritten(frozenset(names))

    def _refuse_unwritten(self, sent: frozenset[str]) -> None:
        """A buffer that no sync ever writes may stay as it was at the engine's start: the model's class computes it. A
        parameter would be as old as the run, or as it was allocated where no checkpoint holds it."""
        missing = self.unwritten
        stale = [each for each in missing if each[1] or each[0].name in sent or not each[0].buffer]
        if stale:
            raise RuntimeError(
                f"the sync leaves {len(stale)} of {self.tensor_count} engine parameters unwritten, or writes them only "
                f"in part: {_elements(stale)}. The engine would not have the trainer's weights. Give trainer "
                f"and engine the same model, or one that the engine loads whole; or {TURN_OFF}, which raises no error."
            )
        text = f"the sync leaves {len(missing)} of {self.tensor_count} engine parameters and buffers unwritten: "
        text += _elements(missing)
        if missing and not self._real:
            raise RuntimeError(f"{FORMAT_KEY}=dummy: {text}. They would stay random. Set {FORMAT_KEY}=auto.")
        if missing:
            self._say(f"{text}; the engine keeps what it loaded at its start")

    def _find_factors(self, plan: Plan, tensors: Tensors, digests: list[str]) -> None:
        """Weighs every part that this rank's engine rank hashes."""
        # One trainer rank hashes a byte in every group that shares the tensor out, or each where all hold it
        world = len(self._agreement.ranks.trainers)
        times = {entry.name: world // bucket.world for bucket in plan.buckets for entry in bucket.entries}
        self._names = tensors.names
        self._times_sent = torch.tensor([times[name] for name in self._names], dtype=torch.int64)
        many = Counter(digest for digest in digests if digest)
        maps = {digest: self._maps[digest] for digest in many}
        read, held = dict[str, list[HashedPart]](), dict[str, list[HashedPart]]()
        self.left_out = {}
        for digest, found in maps.items():
            read[digest] = read_parts(found, tensors.owners)
            held[digest] = [(tensors.owners[move.tensor], move.box) for move in held_parts(found, tensors.dtypes)]
            self.left_out |= {tensors.names[number]: why for number, why in found.not_held(tensors.dtypes).items()}
            if found.derives:
                self.left_out[DERIVED] = "is computed"
        self._read = _HashFactors(tensors, read, many, self._digest)
        self._held = _HashFactors(tensors, held, many, self._digest)
        uneven = torch.minimum(self._read.times, self._held.times).lt(0).nonzero().flatten().tolist()
        self.left_out.update((tensors.names[number], UNEVEN) for number in uneven)
        placed = (self._held.times > 0).nonzero().flatten().tolist()
        self.compared = tuple(number for number in placed if tensors.names[number] not in self.left_out)
        if not self.compared and self._config.verify not in ("first", "never"):
            name, why = next(iter(self.left_out.items()), ("nothing was sent", "nothing to compare"))
            raise ValueError(
                f"{KEY_PREFIX}.verify={self._config.verify}, but nothing that the engine holds can be compared: "
                f"{name} ({why}). Set {KEY_PREFIX}.verify=first, which only logs this."
            )
        if self._agreement.ranks.rank == 0 and self._config.verify != "never":
            self._say_what_is_compared(next(iter(maps.values())))

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(text)

    def _say_what_is_compared(self, found: LoadMap) -> None:
        self._say(f"{len(self.compared)} of {len(self._names)} tensors sent can be compared to the engine's parameters")
        for why in dict.fromkeys(self.left_out.values()):
            names = [name for name, reason in self.left_out.items() if reason == why]
            self._say(f"not comparable: {some(names)} ({why})")
        if found.own_writes and (unproven := unwritten(msgspec.structs.replace(found, own_writes=()))):
            self._say(f"{len(unproven)} engine parameters are not proven whole: {_elements(unproven)}")

    def weighed(self, sent: torch.Tensor, committed: Committed | None, verified: bool) -> torch.Tensor:
        """This rank's share of ``compare``: int64 of shape ``(2, tensors)``, hashes of what was packed here and of what
        this rank's engine rank (``committed``: ``None`` where there is none) read; where it is compared (``verified``)
        a third row, of what it holds. Raises ValueError where it hashed another number of parts than its map has."""
        nothing, hashed = torch.zeros_like(sent), committed.held if committed is not None else None
        read = nothing if committed is None else self._read.sum(committed.sums)
        held = nothing if hashed is None else self._held.sum(hashed.sums)
        return torch.stack([sent, read, held] if verified else [sent, read])

    def compare(self, weighed: torch.Tensor) -> None:
        """Collective: compares what was packed with what was read and, of a verified sync, with what is held, from the
        result of ``weighed``. Raises SyncError, with names and the same text on every rank, where they differ."""
        total = self._agreement.vote("ending the engine's update and comparing hashes", weighed)
        sent, read, *held = total.reshape(weighed.shape)
        if names := self._unequal(sent, read, self._read.times):
            raise SyncError(
                f"weight sync failed: the bytes of {some(names)} changed on the way to the "
                "engine. The memory between trainer and engine is not reliable, or something overwrote a bucket in "
                "use, or replicas of the trainer differ. Trainer weights are unchanged. "
                f"Look at the machine's log (ECC, Xid); {TURN_OFF} to compare."
            )
        if held and (names := self._unequal(sent, held[0], self._held.times)):
            raise SyncError(
                f"weight sync failed: the engine's parameters do not hold what was sent of "
                f"{some(names)}. They were changed while they were copied or after it, or a copy "
                f"went to the wrong place. Trainer weights are unchanged. {KEY_PREFIX}.verify=never stops comparing."
            )

    def _unequal(self, sent: torch.Tensor, found: torch.Tensor, times: torch.Tensor) -> list[str]:
        wrong = (sent * times != found * self._times_sent) & (times > 0)
        return [self._names[number] for number in wrong.nonzero().flatten().tolist()]


class _HashFactors:
    """Puts the hashes of all parts together.

    Args:
        tensors: of the plan.
        parts: of each map, by digest.
        many: how many engine ranks have each map.
        own: the map of this rank's engine rank.

    Attributes:
        times: how often each tensor counts in the end: int64 of shape ``(tensors,)``; not positive where it cannot be
            compared.
    """

    def __init__(self, tensors: Tensors, parts: dict[str, list[HashedPart]], many: Counter[str], own: str) -> None:
        replicas = math.gcd(*many.values())  # as many as each map has at least
        everyone = [digest for digest in parts for _ in range(many[digest] // replicas)]
        times, factors = hash_factors(tensors.numels, [parts[digest] for digest in everyone])
        self.times = torch.tensor(times, dtype=torch.int64) * replicas
        self._tensors = np.array([number for number, _ in parts[own]] if own else (), dtype=np.int64)
        self._factors = np.array(factors[everyone.index(own)] if own else (), dtype=np.int64)

    def sum(self, sums: bytes) -> torch.Tensor:
        """One hash per tensor of the parts of this rank's engine rank: int64 of shape ``(tensors,)``."""
        found = np.frombuffer(sums, dtype="<i8").astype(np.int64)
        if len(found) != len(self._factors):
            raise ValueError(f"the engine hashed {len(found)} parts of tensors, and its map has {len(self._factors)}")
        total = np.zeros(len(self.times), dtype=np.int64)
        np.add.at(total, self._tensors, found * self._factors)
        return torch.from_numpy(total)


def refuse_changed(changed: Sequence[str]) -> None:
    """Raises ValueError where constants, or elements in a wider dtype, have other bits than a load leaves."""
    if changed:
        raise ValueError(f"the engine's parameters hold what no load puts there: {some(changed)}")


def _elements(missing: Sequence[tuple[StateTensor, int, int]]) -> str:
    return some([f"{tensor.name} ({wrote} of {total} elements)" for tensor, wrote, total in missing])


class Cadence:
    """Decides by ``custom.sync.verify`` which syncs are verified; all ranks of a trainer count the same syncs."""

    def __init__(self, verify: str | int) -> None:
        self._verify = verify
        self._ended: dict[str, int] = {}

    def due(self, digest: str) -> bool:
        """True if the next sync of a plan is to be verified."""
        ended = self._ended.get(digest, 0)
        if isinstance(self._verify, int):
            return ended % self._verify == 0
        return self._verify == "always" or (self._verify == "first" and ended < FIRST_SYNCS)

    def note(self, digest: str, restarts: bool = False) -> None:
        """Counts a sync of a plan that has ended well. ``restarts``: a new load map was used and not verified, so the
        count is 0 again."""
        self._ended[digest] = 0 if restarts else self._ended.get(digest, 0) + 1
