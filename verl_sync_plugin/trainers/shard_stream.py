# SPDX-License-Identifier: Apache-2.0
"""The weight stream that the plugin's training engines return, where the plugin is on. Imports none of verl's engines:
each of the plugin's is imported while verl's is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from verl_sync_plugin.config.settings import TRAINERS, TURN_OFF
from verl_sync_plugin.errors import RegistryConflictError

WeightStream = Iterable[tuple[str, torch.Tensor]]

# verl registers its engines for a device only; a (device, vendor) entry is looked up before it
VENDORS = ["nvidia", "amd"]

# verl builds engine and rollout adapter in one worker process but gives the rollout config only to the adapter, which
# therefore says here what it was configured to do
_taken_over = False


def take_over(enabled: bool) -> None:
    """Sets whether the plugin's rollout adapter takes this process's weight stream; called when verl builds the
    adapter."""
    global _taken_over
    _taken_over = enabled


class ShardStream:
    """The engine's weight stream. The sharding manager takes the engine from it; anyone else may
    iterate it and gets verl's own stream, for example a checkpoint engine of a disaggregated run."""

    def __init__(self, engine: Any, stock: Callable[[], WeightStream]) -> None:
        self.engine = engine
        self._stock = stock

    @property
    def trainer(self) -> str:
        """verl's strategy name of the engine."""
        return str(self.engine.engine_config.strategy)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._stock())


class ShardExport:
    """The weight export of both training engines; comes before verl's class among the bases."""

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any] | None]:
        """verl's contract: ``(weight stream, adapter config or None)``. Moves nothing when the plugin is on: offloaded
        parameters stay in host memory and are read there."""
        stock = super().get_per_tensor_param  # type: ignore[misc]
        if not _taken_over:
            found: tuple[Any, dict[str, Any] | None] = stock(*args, **kwargs)
            return found

        def stock_stream() -> WeightStream:
            stream: WeightStream = stock(*args, **kwargs)[0]
            return stream

        return ShardStream(self, stock_stream), None


def refuse_plain_stream() -> None:
    """Raises RegistryConflictError where verl's registry holds somebody else's engine for one of our strategies, else
    ValueError: the trainer's strategy is another."""
    engines = defaultdict(list)
    for strategy in TRAINERS:
        if (engine := _chosen(strategy)) is not None:
            engines[engine].append(strategy)
    for engine, strategies in engines.items():
        what = f"verl's training engine for {', '.join(strategies)} is {engine.__module__}.{engine.__qualname__} here"
        if engine.__module__.startswith("verl."):
            raise RegistryConflictError(
                f"{what}, verl's own: verl-sync-plugin registers its engines for the vendors {' and '.join(VENDORS)}. "
                f"Set VERL_ENGINE_VENDOR={VENDORS[0]} in the environment of every node, or {TURN_OFF}."
            )
        raise RegistryConflictError(
            f"{what}, where verl-sync-plugin needs its own: another plugin has taken the key. Uninstall one of the two "
            f"plugins, or {TURN_OFF}."
        )
    raise ValueError(
        "the training engine exports a plain weight stream: no sharding manager knows it "
        f"(actor_rollout_ref.actor.strategy other than {', '.join(TRAINERS)}). Use one of these, or {TURN_OFF}."
    )


def _chosen(strategy: str) -> type | None:
    """The engine that verl chooses in this process; ``None`` when it is ours or a subclass, or there is none."""
    from verl.workers.engine.base import EngineRegistry

    try:
        engine: type = EngineRegistry.get_engine_cls("language_model", strategy)
    except (AssertionError, ValueError):  # not installed, or not for this device
        return None
    ours = any(base.__module__.startswith("verl_sync_plugin.") for base in engine.__mro__)
    return None if ours else engine
