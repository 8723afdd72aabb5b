# SPDX-License-Identifier: Apache-2.0
"""Whether the engine takes in every byte that the trainer sends.

The ledger proves that every parameter of the engine is written. This is the other half: an engine's models leave out
names that they do not know (verl streams ``mlp.experts.0.gate_proj.weight``, and a Mixtral may expect another name),
and go on with what they had. Each engine rank tells which bytes of every tensor its model uses (``receiver/uses.py``),
and what the ranks of one engine use together must be everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import torch

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.copies.hulls import numbers_of
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import Used

NAMED = 5  # tensors in a message


class UseCheck:
    """The trainer's check that the engine uses everything sent: once per plan, and again when an engine rank's model
    changed.

    Args:
        agreement: where ranks settle.
        ranks: those beside the ranks of this rank's engine; none where it has no engine.
    """

    def __init__(self, agreement: Agreement, ranks: Sequence[int]) -> None:
        self._agreement = agreement
        self._ranks = tuple(ranks)
        self._proven = ""
        self._used: Used | None = None
        self.layers = ""  # what messages say where trainer and engine have different numbers of layers

    def asks(self, plan: Plan) -> bool:
        """Whether the engine ranks are to tell, before they load, what they use; the same on all ranks."""
        return plan.digest != self._proven

    def note(self, used: Used | None) -> bool:
        """Keeps what an engine rank tells, which it tells once only; returns whether that was anything."""
        self._used = used or self._used
        return used is not None

    def forget(self) -> None:
        """Forgets, on all ranks, what engine ranks told in a sync that was given up before it was compared."""
        self._proven = ""

    def compare(self, plan: Plan, loaded: bool, layers: int = 0) -> dict[str, torch.dtype]:
        """Collective: refuses a plan of which the engine leaves something out.

        Args:
            plan: what is sent.
            loaded: True at the end of a sync, when every engine rank must know.
            layers: how many decoder layers the trainer's model has; 0 when that is unknown, or was said before.

        Returns:
            The dtypes in which engine ranks would take more of some tensors, the same on every rank.

        Raises:
            SyncError: bytes of some tensors are used by no rank of an engine, or it cannot tell and has other layers;
                names them, the same text on every rank.
        """
        self._proven = ""
        gathered = self._agreement.gather("exchanging what the engine uses", (self._used, layers))
        everywhere = [used for used, _ in gathered]
        told = [everywhere[rank] for rank in self._agreement.ranks.rollouts]
        ours = next((number for _, number in gathered if number), 0)
        theirs = next((each.layers for each in told if each is not None and each.layers), 0)
        if ours and theirs:
            said = f"The trainer's model has {ours} layers, the engine's {theirs} (num_hidden_layers). "
            self.layers = said if ours != theirs else ""
        known = all(each is not None and each.readings is not None for each in told)
        with self._agreement.attempt():
            if known and self._ranks:
                used = [each for rank in self._ranks if (each := everywhere[rank]) is not None]
                _refuse_left_out(plan, used, self.layers)
            elif self.layers and not known:  # many of an engine's loaders raise KeyError at a layer that they lack
                raise ValueError(f"{self.layers}Give both the same, or {TURN_OFF}, which does not notice.")
            elif loaded and not known:
                raise RuntimeError("the engine did not tell which of the tensors sent it uses")
        self._agreement.settle("checking what the engine uses")
        if known:
            self._proven = plan.digest
        return _widest(plan, [each for each in told if each is not None])


def _widest(plan: Plan, told: Iterable[Used]) -> dict[str, torch.dtype]:
    names = list(numbers_of(bucket.entries for bucket in plan.buckets))
    found: dict[str, torch.dtype] = {}
    for name, dtype in ((names[n], getattr(torch, dtype)) for each in told for dtype, ns in each.wider for n in ns):
        found[name] = torch.promote_types(found.get(name, dtype), dtype)
    return found


def _refuse_left_out(plan: Plan, told: list[Used], layers: str) -> None:
    names = list(numbers_of(bucket.entries for bucket in plan.buckets))
    found = left_out(len(names), told)
    if not found:
        return
    shown = ", ".join(f"{names[number]} ({unused} of {nbytes} bytes)" for number, unused, nbytes in found[:NAMED])
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    raise ValueError(
        f"{told[0].model} leaves out {len(found)} of the {len(names)} tensors that the trainer sends: "
        f"{shown}{more}. {layers}It would generate from other weights than are trained, and so it would with stock "
        "verl, which does not notice. Use a model that the engine takes in whole; or, if what is left out does not "
        f"matter, {TURN_OFF}."
    )


def left_out(tensors: int, told: Iterable[Used]) -> list[tuple[int, int, int]]:
    """Tensors of which the ranks of one engine together use less than everything.

    Args:
        tensors: how many there are.
        told: what each rank of the engine uses.

    Returns:
        Number, unused bytes and all bytes of each, in ascending order.
    """
    runs: dict[int, list[tuple[Run, ...]]] = {number: [] for number in range(tensors)}
    sizes: dict[int, int] = {}
    for used in told:
        for nbytes, found, numbers in used.readings or ():
            for number in numbers:
                runs[number].append(found)
                sizes[number] = nbytes
    unused = ((n, sizes.get(n, 0) - _covered(tuple(of_rank))) for n, of_rank in runs.items())
    return [(number, missing, sizes.get(number, 0)) for number, missing in unused if missing or number not in sizes]


@cache
def _covered(ranks: tuple[tuple[Run, ...], ...]) -> int:
    """Bytes in the union of runs, of which there are a few kinds in a model of thousands of tensors."""
    starts, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for run in dict.fromkeys(run for runs in ranks for run in runs):
        begin = run.source + np.arange(run.count, dtype=np.int64) * run.source_stride
        starts.append(begin)
        ends.append(begin + run.width)
    low, high = np.concatenate(starts), np.concatenate(ends)
    order = np.argsort(low, kind="stable")
    low, reached = low[order], np.maximum.accumulate(high[order])
    before = np.concatenate((low[:1], reached[:-1]))
    return int(np.clip(reached - np.maximum(low, before), 0, None).sum())
