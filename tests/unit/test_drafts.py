# SPDX-License-Identifier: Apache-2.0
"""Draft models of speculative decoding: a sync writes the target alone, and a draft outlives the engine's sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from noting_manager import Manager
from sglang.srt.managers.scheduler_update_weights_mixin import SchedulerUpdateWeightsMixin
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from verl_sync_plugin import compat

Make = Callable[..., Any]


@pytest.fixture
def group() -> Iterator[Any]:
    """The group of an engine's ranks, of which there is one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Updated:
    """A worker of SGLang's that notes whether it is to load."""

    def __init__(self) -> None:
        self.loads = 0

    def update_weights_from_tensor(self, request: Any) -> tuple[bool, str]:
        self.loads += 1
        return True, ""


def test_sglang_loads_into_the_target_and_not_into_the_draft(server_with: Make, group: Any) -> None:
    target, draft = Updated(), Updated()
    scheduler: Any = SimpleNamespace(
        tp_worker=target, draft_worker=draft, tp_cpu_group=group, flush_cache_after_weight_update=lambda request: None
    )

    class Engine(Manager):
        async def update_weights_from_tensor(self, obj: Any, request: None) -> tuple[bool, str]:
            answer = SchedulerUpdateWeightsMixin.update_weights_from_tensor(scheduler, obj)
            return answer.success, answer.message

    asyncio.run(server_with(Engine(), "abort").load_weights(("sync",), "1"))
    assert (target.loads, draft.loads) == (1, 0)


def test_releases_that_select_models_are_asked_for_the_target() -> None:
    class Request:
        __struct_fields__ = ("serialized_named_tensors", "load_format", "selector")

    assert compat.target_alone(Request) == {"selector": "target"}


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ({"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/a/draft"}, (True, "auto")),
        ({"speculative_algorithm": "NGRAM"}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_a_draft_is_loaded_from_its_checkpoint_and_kept_while_the_engine_sleeps(
    arguments: dict[str, str], kept: tuple[Any, Any], server_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's default loads random weights, which the first sync replaces in the target; nobody sends the draft's."""
    given: list[Any] = []

    async def launched(self: Any, **_: Any) -> None:
        given.append(dict(self.config.engine_kwargs["sglang"]))

    monkeypatch.setattr(SGLangHttpServer, "launch_server", launched)
    server = server_with(Manager(), "abort", RolloutMode.HYBRID, "naive")
    server.config.engine_kwargs["sglang"] = dict(arguments)
    asyncio.run(server.launch_server())
    (launch,) = given
    found = launch.get("enable_draft_weights_cpu_backup"), launch.get("speculative_draft_load_format")
    assert found == kept
