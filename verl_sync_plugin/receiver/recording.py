# SPDX-License-Identifier: Apache-2.0
"""What is known of one dry ``load_weights``: the tensors given to it, and what it did with them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Source:
    """A tensor of the sync: its name and layout."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None

    @property
    def layout(self) -> tuple[object, ...]:
        """What two tensors of the same bytes have in common."""
        return self.dtype, self.shape, self.strides

    @property
    def nbytes(self) -> int:
        """Of the elements, without what lies between them."""
        return math.prod(self.shape) * self.dtype.itemsize

    def meta(self) -> torch.Tensor:
        """A tensor of this layout without bytes, with a storage of its own."""
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Copy:
    """Elements of a source (a view of its meta tensor) and the elements of the model they go to.

    Attributes:
        name: of the source.
        source: what is read.
        target: what is written.
        order: number of this write among all copies and fills of the load.
    """

    name: str
    source: torch.Tensor
    target: torch.Tensor
    order: int = 0


@dataclass(frozen=True)
class Fill:
    """A constant written into elements of the model; ``order`` as of ``Copy``."""

    target: torch.Tensor
    value: float
    order: int = 0


@dataclass
class Recording:
    """What one dry ``load_weights`` did.

    Attributes:
        copies: plain copies from sources into the model.
        fills: constants written into the model.
        refused: names that something other than views and copies was done with, and what.
        taken: names of these of which something ended up in the model, or with the host.
        others: what else was written into the model, of tensors that are refused; their sources say nothing.
        computed: names of these of which other values may have been made on the way, which depend on their dtype.
        spoiled: why nothing of the recording can be replayed; empty when it can.
        derives: the load also computed something from loaded parameters.
        ended: the load came to its end, so what it left alone is known.
    """

    copies: list[Copy] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    others: list[Copy] = field(default_factory=list)
    computed: set[str] = field(default_factory=set)
    spoiled: str = ""
    derives: bool = False
    ended: bool = False

    @property
    def writes(self) -> int:
        """How many writes into the model there are so far."""
        return len(self.copies) + len(self.fills) + len(self.others)

    def wider(self, sources: Iterable[Source]) -> dict[str, torch.dtype]:
        """The tensors of which the model could take more than is sent: it keeps them in a wider dtype, or computes from
        them, and then (float64) each wider one gives other bits. Of a load that raised, what it did before."""
        found = {}
        for source in (source for source in sources if source.dtype.is_floating_point):
            found[source.name] = torch.float64 if source.name in self.computed else source.dtype
        for copy in [*self.copies, *self.others]:
            kept, known = copy.target.dtype, found.get(copy.name)
            if known is not None and kept.is_floating_point and kept.itemsize > known.itemsize:
                found[copy.name] = kept
        sent = {source.name: source.dtype for source in sources}
        return {name: dtype for name, dtype in found.items() if dtype != sent[name]}
