"""A second custom loader for tests: writes what an SGLang rank really holds to a file. Runs in the scheduler."""

from __future__ import annotations

from typing import Any

import torch


def dump(model: torch.nn.Module, named_tensors: list[tuple[Any, torch.Tensor]]) -> None:
    """Saves the rank's state dict to ``<path>.<tp rank>``; the path is the name of the only pair."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    path = f"{named_tensors[0][0]}.{get_tp_group().rank_in_group}"
    torch.save({name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, path)
