# SPDX-License-Identifier: Apache-2.0
"""What each half of a separate sync has in place of the other: a rollout rank without trainer, a trainer rank without
engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.lora.refusals import RefuseUntied
from verl_sync_plugin.lora.settings import RefuseAdapter
from verl_sync_plugin.sync.endpoint import LoadOutcome, PendingLoad, RolloutEndpoint
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.transport.protocol import LoadRequest


class NoTrainer(ParameterSource):
    """What a rollout rank holds of the trainer's parameters: nothing."""

    def shards(self) -> list[Shard]:
        return []


class NoEngine(RolloutEndpoint):
    """What a trainer rank has beside it of a separate rollout: nothing, so that it never leads. What the engines cannot
    hold or serve it refuses all the same, before anything is sent.

    Args:
        refuse_untied: of the rollout engine, see ``RolloutEndpoint.refuse_untied``.
        refuse_adapter: likewise, see ``RolloutEndpoint.refuse_adapter``; its second argument says under which keys.
    """

    def __init__(self, refuse_untied: RefuseUntied, refuse_adapter: RefuseAdapter) -> None:
        self._refuse_untied = refuse_untied
        self._refuse_adapter = refuse_adapter

    @property
    def leader(self) -> bool:
        return False

    @property
    def restores_uncovered(self) -> bool:
        return False

    @property
    def ranks(self) -> tuple[int, ...]:
        return ()

    async def resume(self, tags: list[str]) -> None:
        raise AssertionError("no leader")

    async def finish(self, tags: list[str]) -> None:
        raise AssertionError("no leader")

    async def abandon(self, why: str) -> None:
        raise AssertionError("no leader")

    async def publish(self, report: dict[str, Any]) -> None:
        raise AssertionError("no leader")

    async def load_adapter(
        self, settings: Mapping[str, Any], factors: dict[str, torch.Tensor], weight_version: str | None
    ) -> LoadOutcome:
        raise AssertionError("no leader")

    def start_load(self, request: LoadRequest, weight_version: str | None) -> PendingLoad:
        raise AssertionError("no leader")

    def flush_behind_load(self) -> None:
        raise AssertionError("no leader")

    def refuse_untied(self, architectures: Iterable[str], where: str) -> None:
        self._refuse_untied(architectures, where)

    def refuse_adapter(self, settings: Mapping[str, Any]) -> None:
        self._refuse_adapter(settings, {})
