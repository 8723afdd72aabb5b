# SPDX-License-Identifier: Apache-2.0
"""What an engine rank tells of its own parameters after a sync, behind ``Committed`` (see ``protocol.py``)."""

from __future__ import annotations

from dataclasses import dataclass

from verl_sync_plugin.layout.strided import Run

# Of one tensor: for every copy that the model's load makes of it, which of its bytes that takes. Targets are left out.
Parts = tuple[tuple[Run, ...], ...]
# Of what size, the parts, and the numbers of the tensors that are so.
Placed = tuple[tuple[int, Parts, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Proven:
    """What one engine rank holds.

    Attributes:
        sums: the hash of what lies in the parameters, as little-endian int64: for each entry of ``placed`` and each of
            its tensors, one per part.
        placed: what these are of; ``None`` when that is what was told the last time.
        left_out: tensors whose bytes cannot be found again in the parameters, and why.
        unproven: engine parameters of which some elements are neither compared nor constant: name, how many elements
            are, and how many there are.
        narrowed: number and dtype of the tensors that the model keeps in a narrower dtype than is sent. They are told
            of and hashed as if they had been sent in that dtype.
        nbytes: bytes of parameters that were compared.
        changed: engine parameters in which a constant, such as the padding of a vocabulary, is not what it was.
        no_room: why this rank could not find out in this sync where its tensors lie; empty where it could.
    """

    sums: bytes
    placed: Placed | None
    left_out: tuple[tuple[str, str], ...] = ()
    unproven: tuple[tuple[str, int, int], ...] = ()
    narrowed: tuple[tuple[int, str], ...] = ()
    nbytes: int = 0
    changed: tuple[str, ...] = ()
    no_room: str = ""
