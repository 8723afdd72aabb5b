# SPDX-License-Identifier: Apache-2.0
"""What a bridge says of the weights of one rank: global names, parts, and the HF tensors that they yield."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from typing import Any

import torch

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.trainers.megatron.layout import LocalParameter, Product
from verl_sync_plugin.trainers.megatron.model import ModelTensors
from verl_sync_plugin.trainers.megatron.trace import CopyTrace

# Numbers of layers and of experts in a name, not the 1 of linear_fc1
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|(?<=weight)\d+$|(?<=bias)\d+$")


class LayoutReader(ABC):
    """Reads one rank's weights as its bridge would convert them; keeps what it has traced.

    Attributes:
        tied: the last pipeline stage has its own copy of a tied embedding, and the bridge exports both under one name.
    """

    tied: bool = False

    @abstractmethod
    def read(self, model: ModelTensors, run: str) -> dict[int, LocalParameter]:
        """This rank's weights by their places in ``model.tensors``; without what the bridge does not export. All ranks
        read at the same time: a bridge may take part in collectives for it.

        Args:
            model: as it was last looked at.
            run: the name of this reading, see ``Guard.begin``.

        Raises:
            NotACopyError: what a parameter becomes is no copy of it, or cannot be told; names the parameter.
            ValueError: a parameter is stored in a way that cannot be sent, or the bridge cannot convert it; names it.
        """


def product_of(trace: CopyTrace, name: str, tensor: torch.Tensor, parts: int) -> Product:
    """What the inputs of a trace contribute to one of its results.

    Raises:
        NotACopyError: values are computed.
    """
    shares: list[list[Run]] = [[] for _ in range(parts)]
    for part, run in trace.runs(tensor):
        shares[part if parts > 1 else 0].append(run)
    kept = tuple(map(tuple, shares))
    return Product(name, tuple(tensor.shape), hashlib.sha256(repr(kept).encode()).hexdigest()[:16], kept)


def refuse_wrapped(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError when a weight is not a plain tensor (fp8 of TransformerEngine)."""
    data: Any = tensor.data
    if type(data) is not torch.Tensor:
        raise ValueError(
            f"parameter {name!r} is stored as {type(data).__name__}: weight sync reads plain tensors. "
            f"Set actor_rollout_ref.actor.megatron.override_transformer_config.fp8=null, or {TURN_OFF}."
        )
