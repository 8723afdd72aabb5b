# SPDX-License-Identifier: Apache-2.0
"""A plain state dict: names of a checkpoint to tensors, or to DTensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from verl_sync_plugin.trainers.dtensors import DTensorSource
from verl_sync_plugin.trainers.naming import Rewrite
from verl_sync_plugin.trainers.wire import WirePolicy


class StateDictSource(DTensorSource):
    """Looks all tensors up anew for every sync.

    Args:
        given: the state dict of the sync under way.
        policy: wire dtypes, of every floating-point tensor: a state dict does not tell buffers from parameters.
        rewrite: verl's stream rewriting.
        unsaved: second names of tied parameters, see ``naming.saved_names``.
    """

    def __init__(
        self,
        given: Callable[[], Mapping[str, torch.Tensor]],
        policy: WirePolicy,
        rewrite: Rewrite,
        unsaved: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(policy, rewrite, unsaved)
        self._given = given

    def _state(self) -> Mapping[str, torch.Tensor]:
        state = self._given()
        self._parameters = set(state)
        return state
