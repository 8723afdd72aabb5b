# SPDX-License-Identifier: Apache-2.0
"""The weight stream that the plugin's training engines return. Imports none of verl's engines: each of the plugin's is
imported while verl's is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

WeightStream = Iterable[tuple[str, torch.Tensor]]

# verl registers its engines for a device only; a (device, vendor) entry is looked up before it
VENDORS = ["nvidia", "amd"]


class ShardStream:
    """What the engine returns as its weight stream.

    The sharding manager takes the engine from it. Anyone else may iterate it and gets verl's own stream, for example a
    checkpoint engine of a disaggregated run.
    """

    def __init__(self, engine: Any, stock: Callable[[], WeightStream]) -> None:
        self.engine = engine
        self._stock = stock

    @property
    def trainer(self) -> str:
        """verl's strategy name of the engine."""
        return str(self.engine.engine_config.strategy)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._stock())
