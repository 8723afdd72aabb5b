# SPDX-License-Identifier: Apache-2.0
"""Counts bytes where they move: what broadcasts bring to a rank, and what an engine rank reads of the trainer's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl_sync_plugin.copies.copier import _PlainPrepared
from verl_sync_plugin.engine.load import ModelLoad
from verl_sync_plugin.transport.joint import JointRanks

READ = "separate.counted.read"


class CountedRanks(JointRanks):
    """Counts what broadcasts have brought since there is the group, by the rank that sent it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.came: Counter[int] = Counter()

    def broadcast(self, memory: torch.Tensor, root: int) -> dist.Work:
        if root != self.rank:
            self.came[root] += memory.nbytes
        return super().broadcast(memory, root)


class _Reading:
    """What the copies of one engine rank have read of its trainer ranks; in its scheduler."""

    begun = under_way = False
    nbytes = 0

    @classmethod
    def begin(cls) -> None:
        """Also the plugin's check of the engine's own parameters is made of blocks; these read nothing of a trainer."""
        cls.begun, honest = True, _PlainPrepared.run

        def run(prepared: _PlainPrepared, *args: Any, **kwargs: Any) -> None:
            if cls.under_way:
                cls.nbytes += sum(block.width * block.count * block.grow for block in prepared._blocks)
            honest(prepared, *args, **kwargs)

        _PlainPrepared.run = run  # type: ignore[method-assign]
        ModelLoad._run = cls._loading(ModelLoad._run)  # type: ignore[method-assign]

    @classmethod
    def _loading(cls, honest: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            cls.under_way = True
            try:
                honest(*args)
            finally:
                cls.under_way = False

        return run


def read(model: torch.nn.Module, named_tensors: list[tuple[Any, torch.Tensor]]) -> None:
    """A custom loader. Writes to ``<path>.<tp rank>``, the path being the name of the only pair, how many bytes the
    rank has read since it was called the last time; the first time it begins to count."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    path = Path(f"{named_tensors[0][0]}.{get_tp_group().rank_in_group}")
    if not _Reading.begun:
        _Reading.begin()
    path.write_text(str(_Reading.nbytes))
    _Reading.nbytes = 0
