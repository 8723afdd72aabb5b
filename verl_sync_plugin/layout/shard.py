# SPDX-License-Identifier: Apache-2.0
"""One rank's part of one base, with access to its elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl_sync_plugin.layout.tensors import Base


@dataclass(frozen=True)
class Member:
    """One parameter inside a base, by the trainer's name, before verl's rewriting into HF tensors: ``shape`` of the
    whole parameter, ``start`` its first element in the base, ``strides`` in elements (``None``: its elements lie in the
    order of their indices)."""

    name: str
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...] | None = None


@dataclass(
    slots=True, eq=False
)  # not frozen: thousands are made in every sync, and that would take three times as long
class Shard:
    """One base with access to this rank's run of it. Never changed.

    Attributes:
        base: equal on all ranks of the group.
        local: returns this rank's run, 1-D, in the trainer's dtype and on the trainer's device (host memory when
            parameters are offloaded). It aliases the live parameter: read it, never write it.
        merge: ``merge(part, begin)`` turns the elements from ``begin`` on, on the device, into what travels; the next
            call overwrites what it returns. ``None``: the run travels as it is.
        members: the parameters in the base; tied ones under all their names. Buffers have none.
        run: what ``local`` would return, perhaps in another shape, for callers that only need its address: thousands of
            flattened views cost more than moving them. ``None``: ask ``local``.
    """

    base: Base
    local: Callable[[], torch.Tensor]
    merge: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    members: tuple[Member, ...] = ()
    run: torch.Tensor | None = None
