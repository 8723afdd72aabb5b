# SPDX-License-Identifier: Apache-2.0
"""Whether the engine holds, in its own parameters, what the trainer sent.

After a sync every engine rank hashes what lies in its parameters (``receiver/proof.py``) as the trainer ranks hashed
what they packed, by the place in the bucket. Engine ranks hold different parts of a tensor, or the same ones, and some
parts more often than others (keys and values of fewer heads than ranks). So each hashes part by part, all of them tell
once which bytes a part is, and the trainer ranks weigh every part so that each byte counts equally often. Then one sum
over all ranks compares every copy of every byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.copies.hulls import numbers_of
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.log import say
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.proof import Parts, Placed, Proven
from verl_sync_plugin.verify.balance import balance
from verl_sync_plugin.verify.hashes import NAMED, times_sent

MADE = "is made on the way, and rounded by the engine"
UNEVEN = "the engine's ranks hold parts of it that cannot be compared together"


class DestinationCheck:
    """The trainer's comparison; keeps what the engine ranks hold of each tensor, which changes only with the plan or
    the layout of an engine's parameters.

    Attributes:
        compared: numbers of the tensors that are compared wherever they lie.
        narrowed: dtypes of tensors that engines keep in a narrower dtype than is sent, by number.
        left_out: by name, tensors that are not on every engine rank, with the reason.
        no_room: why an engine rank could not find out where its tensors lie; empty where all could.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._placed: Placed = ()
        self._known = ""  # digest of the plan whose places all ranks know
        self._names: list[str] = []
        self._factors: dict[int, tuple[int, ...]] = {}  # of this rank's parts, by tensor
        self._times = torch.zeros(0, dtype=torch.int64)
        self._times_sent = torch.zeros(0, dtype=torch.int64)
        self.compared: tuple[int, ...] = ()
        self.left_out: dict[str, str] = {}
        self.narrowed: dict[int, str] = {}
        self.no_room = ""

    def knows(self, plan: Plan) -> bool:
        """Whether what the engine ranks hold of a plan's tensors is known."""
        return plan.digest == self._known

    def note(self, proven: Proven, plan: Plan) -> bool:
        """Keeps what an engine rank says it holds; returns whether ``learn`` is needed."""
        if proven.placed is not None:  # told once only, so kept even if this sync fails
            self._placed, self._known = proven.placed, ""
        return not self.knows(plan)

    def forget(self) -> None:
        """Behind a sync that was given up: has the engine ranks tell again what they hold."""
        self._known = ""

    def learn(
        self, plan: Plan, proven: Proven | None, made: frozenset[int] = frozenset(), sent_by: int | None = None
    ) -> None:
        """Collective: exchanges what the engine ranks hold.

        Args:
            plan: of this sync.
            proven: of the engine rank beside this rank, if there is one.
            made: numbers of tensors of which what this rank packs is not there any more to be rounded once again.
            sent_by: how many ranks send each byte; ``None`` for what the plan says.

        Raises:
            SyncError: any rank has failed since the ranks settled last, or in this; the same text on every rank.
        """
        told = () if proven is None else (self._placed, dict(proven.narrowed), proven.left_out, proven.unproven)
        no_room = "" if proven is None else proven.no_room
        everywhere = self._agreement.gather("exchanging what the engine holds", (told, made, no_room))
        with self._agreement.attempt():
            self._take_in(plan, everywhere, sent_by)
        self._agreement.settle("exchanging what the engine holds")

    def _take_in(self, plan: Plan, everywhere: list[Any], sent_by: int | None) -> None:
        """What all ranks said in ``learn``."""
        self._names = list(numbers_of(bucket.entries for bucket in plan.buckets))
        planned = times_sent(plan, len(self._agreement.ranks.trainers))
        self._times_sent = planned if sent_by is None else torch.full_like(planned, sent_by)
        engines = [(rank, *told) for rank, (told, *_) in enumerate(everywhere) if told]
        self.no_room = next((f"beside rank {rank}: {why}" for rank, (*_, why) in enumerate(everywhere) if why), "")
        self.left_out = {name: why for *_, left_out, _ in engines for name, why in left_out}
        self.narrowed = {number: dtype for _, _, narrowed, *_ in engines for number, dtype in narrowed.items()}
        made_anywhere = frozenset().union(*(numbers for _, numbers, _ in everywhere))
        parts = {rank: _by_number(placed) for rank, placed, *_ in engines}
        dtypes = {rank: narrowed for rank, _, narrowed, *_ in engines}
        times, self._factors = torch.zeros(len(self._names), dtype=torch.int64), {}
        for number in sorted({number for of_rank in parts.values() for number in of_rank}):
            holders = {rank: of_rank[number] for rank, of_rank in parts.items() if number in of_rank}
            alike = len({dtypes[rank].get(number) for rank in holders}) == 1
            count, factors = balance(next(iter(holders.values()))[0], tuple(parts for _, parts in holders.values()))
            why = "" if alike and count > 0 else UNEVEN
            if number in self.narrowed and number in made_anywhere:
                why = why or MADE
            if why:
                self.left_out.setdefault(self._names[number], why)
            times[number] = 0 if why else count
            self._factors[number] = dict(zip(holders, factors, strict=True)).get(self._agreement.ranks.rank, ())
        self._times, self._known = times, plan.digest
        found = (times > 0).nonzero().flatten().tolist()
        self.compared = tuple(number for number in found if self._names[number] not in self.left_out)
        self._say({name: (held, of) for *_, unproven in engines for name, held, of in unproven})

    def _say(self, unproven: dict[str, tuple[int, int]]) -> None:
        if self._agreement.ranks.rank:
            return
        say(f"of {len(self._names)} tensors sent {len(self.compared)} are found again in the engine's parameters")
        of_reason: dict[str, list[str]] = {}
        for name, why in self.left_out.items():
            of_reason.setdefault(why, []).append(name)
        for why, names in of_reason.items():
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            say(f"not comparable: {', '.join(names[:NAMED])}{more} ({why})")
        if unproven:
            shown = ", ".join(
                f"{name} ({held} of {of} elements)" for name, (held, of) in list(unproven.items())[:NAMED]
            )
            say(f"{len(unproven)} engine parameters are not proven whole: {shown}")

    def refuse_unproven(self, verify: str | int) -> None:
        """Whoever asks for syncs to be verified beyond the first ones is not to believe that they are.

        Args:
            verify: ``custom.sync.verify``.

        Raises:
            SyncError: nothing that the engine holds can be compared, or an engine rank had no memory to find out what
                it holds; the same text on every rank.
        """
        if verify == "first" or (self.compared and not self.no_room):
            return
        name, why = next(iter(self.left_out.items()), ("nothing was sent", "nothing to compare"))
        what = f"nothing of what the engine holds can be compared: {name} ({why})"
        if self.no_room:
            what = (
                f"not every engine rank could find out what it holds ({self.no_room}). Lower rollout."
                "gpu_memory_utilization; rollout.multi_stage_wake_up=True, the default, makes room, too"
            )
        raise SyncError(
            f"weight sync failed: {KEY_PREFIX}.verify={verify}, and {what}. {KEY_PREFIX}.verify=first says so without "
            f"failing, {KEY_PREFIX}.verify=never does not compare."
        )

    def compare(self, sent: torch.Tensor, proven: Proven | None) -> None:
        """Collective: compares what the engine ranks hold with what was sent.

        Args:
            sent: hashes of what this rank packed, of those in ``narrowed`` as the engine keeps them: int64 of shape
                ``(tensors,)``.
            proven: of the engine rank beside this rank, if there is one.

        Raises:
            SyncError: parameters hold something else, which names the tensors, or any rank has failed since the ranks
                settled last; the same text on every rank.
        """
        held = torch.zeros_like(sent)
        with self._agreement.attempt():
            if proven is not None:
                held = weighed(proven.sums, self._placed, self._factors, len(self._names))
        self._agreement.settle("comparing what the engine holds")  # a rank that has nothing to sum leaves nobody alone
        total = self._agreement.sum("comparing what the engine holds", torch.stack([sent, held]))
        wrong = (total[0] * self._times != total[1] * self._times_sent) & (self._times > 0)
        if wrong.any():
            names = [self._names[number] for number in wrong.nonzero().flatten().tolist()]
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            raise SyncError(
                f"weight sync failed: the engine's parameters do not hold what was sent of "
                f"{', '.join(names[:NAMED])}{more}. They were changed while they were copied or behind it, or a copy "
                f"went elsewhere. Trainer weights are unchanged. {KEY_PREFIX}.verify=never stops comparing."
            )


def refuse_changed(proven: Proven) -> None:
    """Raises ValueError where constants beside the weights, or elements in a wider dtype, have other bits than a load
    leaves."""
    if proven.changed:
        shown = ", ".join(proven.changed[:NAMED])
        raise ValueError(f"the engine's parameters hold what no load puts there: {shown}")


def weighed(sums: bytes, placed: Placed, factors: dict[int, tuple[int, ...]], tensors: int) -> torch.Tensor:
    """One hash per tensor of the parts that an engine rank holds: int64 of shape ``(tensors,)``.

    Args:
        sums: ``Proven.sums``.
        placed: what they are of.
        factors: of each part, by tensor.
        tensors: how many there are.

    Raises:
        ValueError: there are other sums than parts.
    """
    found = np.frombuffer(sums, dtype="<i8").astype(np.int64)
    held = np.zeros(tensors, dtype=np.int64)
    start = 0
    for _, parts, numbers in placed:
        block = found[start : start + len(parts) * len(numbers)].reshape(len(numbers), len(parts))
        weights = np.array([factors[number] for number in numbers], dtype=np.int64).reshape(block.shape)
        np.add.at(held, list(numbers), (block * weights).sum(axis=1))
        start += block.size
    if start != len(found):
        raise ValueError(f"the engine hashed {len(found)} parts of parameters, and told of {start}")
    return torch.from_numpy(held)


def _by_number(placed: Placed) -> dict[int, tuple[int, Parts]]:
    return {number: (nbytes, parts) for nbytes, parts, numbers in placed for number in numbers}
