# SPDX-License-Identifier: Apache-2.0
"""The model that one engine rank holds, as the receiver sees it: all that this folder knows of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

FusedPairs = tuple[tuple[str, str], ...]


class EngineModel(ABC):
    """Implemented once per rollout engine, in ``rollouts/<engine>/model.py``; made once per model.

    Attributes:
        engine: the engine's name, for messages.
        fused_pairs: suffixes of Hugging Face names of two tensors of which the model makes one. It must be given both
            in one call of ``load_weights``, and loads both or neither on its own.
        plain_layout: for messages: what a user does so that ``after_load`` changes nothing.
        module: the torch module whose parameters and buffers a sync writes.
        tp_rank: its place among the engine's tensor-parallel ranks, from 0.
        sent: names of all tensors of the sync, set by the receiver before it loads any.
    """

    engine: str = "the engine"
    fused_pairs: FusedPairs = ()
    sent: frozenset[str] = frozenset()
    plain_layout: str = ""

    def __init__(self, module: torch.nn.Module, tp_rank: int) -> None:
        self.module = module
        self.tp_rank = tp_rank

    @property
    def name(self) -> str:
        """The model's class."""
        return type(self.module).__name__

    @abstractmethod
    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The engine's own way to load some tensors of a checkpoint; called with parts of it, one after another.

        Args:
            tensors: by Hugging Face name, whole. Their memory is only lent until the call returns; the model may write
                into it. In a recording these are meta tensors, and no write reaches the model.
        """

    @property
    def fp8_block(self) -> tuple[int, int]:
        """Rows and columns of a block of weights kept in fp8, each with one scale, where a model keeps any. Raises
        ValueError for another layout of scales."""
        why = "keeps weights in fp8, but not in blocks of one size. Remove actor_rollout_ref.rollout.quantization"
        raise ValueError(f"{self.engine}'s {self.name} {why}.")

    @property
    def constants(self) -> dict[str, float]:
        """The parameters that no checkpoint has, by name, and the value that each holds then."""
        return {}

    @property
    def can_derive(self) -> bool:
        """True if the engine has a ``derive_after_load``."""
        return False

    def derive_after_load(self) -> None:
        """Computes again what ``load_weights`` computes from parameters that it has loaded. Called only where
        ``can_derive``, after a sync that copied parameters without ``load_weights``."""
        raise NotImplementedError

    @property
    def refreshed(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters, each with the tensor that ``refresh_copies`` makes of it, which is all that ``load_weights``
        computes from it."""
        return []

    def refresh_copies(self) -> None:
        """Refreshes copies of parameters that the model keeps for its forward; called after every sync."""
        return

    def after_load(self) -> None:
        """Does what the engine does to parameters of a checkpoint, and not after a sync. The first one by a load map
        calls it, and fails where it changes any."""
        return

    def layout_token(self) -> tuple[object, ...]:
        """Returns what must stay equal for a load map to hold, except the places of parameters and buffers, which the
        receiver compares itself. It is compared at every sync, so it must be quick."""
        return ()

    def why_skipped(self, name: str) -> str:
        """The reason why the model rightly leaves a tensor of this name alone; empty where it may not."""
        return ""


def partner_of(name: str, pairs: FusedPairs) -> str | None:
    """The other tensor of a fused pair, by name (``pairs``: ``EngineModel.fused_pairs``); ``None`` for one in none."""
    partners = dict(pairs) | {second: first for first, second in pairs}
    return next((name.removesuffix(one) + other for one, other in partners.items() if name.endswith(f".{one}")), None)
