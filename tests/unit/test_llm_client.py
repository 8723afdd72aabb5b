# SPDX-License-Identifier: Apache-2.0
"""The versions that verl's client of separate rollouts reports of a response, with servers of which a call may span a
sync."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, RayTaskError
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_sync_plugin.errors import HalfWrittenError
from verl_sync_plugin.hooks.trainer import SeparateLLMServerClient, of_separate_rollout, reporting


def client_of(parts: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ours, of a server whose calls end for these reasons, with these fields."""

    async def generate(**_: Any) -> TokenOutput:
        reason, fields = parts.pop(0)
        return TokenOutput(token_ids=[1], log_probs=[0.0], stop_reason=reason, extra_fields=dict(fields))

    async def acquired(self: Any, request_id: str, **_: Any) -> tuple[str, Any]:
        return "server", SimpleNamespace(generate=SimpleNamespace(remote=generate))

    async def at_once(_: float) -> None:
        """verl waits a second before it asks again."""

    monkeypatch.setattr(LLMServerClient, "_acquire_server", acquired)
    monkeypatch.setattr(LLMServerClient, "_release_server", lambda *_, **__: None)
    monkeypatch.setattr("verl.workers.rollout.llm_server.asyncio.sleep", at_once)
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "sglang"}}})
    return of_separate_rollout(FullyAsyncLLMServerClient(config))


SPANNING = {"global_steps": 7, "min_global_steps": 5, "max_global_steps": 7}
WHOLE = {"global_steps": 8}


@pytest.mark.parametrize(
    ("parts", "versions"),
    [
        ([("length", SPANNING)], (5, 7)),
        ([("abort", SPANNING), ("length", WHOLE)], (5, 8)),
        ([("abort", WHOLE), ("length", {"global_steps": 9})], (8, 9)),
        ([("length", {"global_steps": None})], (None, None)),
    ],
)
def test_a_response_names_its_first_and_last_version(
    parts: list[tuple[str, dict[str, Any]]], versions: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(parts, monkeypatch)
    output = asyncio.run(client.generate("request", prompt_ids=[1], sampling_params={}))
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == versions
    assert not parts


@pytest.mark.parametrize(
    ("name", "backend", "pause", "kind"),
    [
        ("sglang", "sync_plugin", "retract", SeparateLLMServerClient),
        ("sglang", "sync_plugin", "abort", SeparateLLMServerClient),
        ("sglang", "nccl", "abort", FullyAsyncLLMServerClient),
        ("sglang", "naive", "abort", FullyAsyncLLMServerClient),
        ("vllm", "nccl", "retract", FullyAsyncLLMServerClient),
    ],
)
def test_the_trainer_hands_out_ours_for_separate_rollouts(name: str, backend: str, pause: str, kind: type) -> None:
    rollout = {"name": name, "checkpoint_engine": {"backend": backend}, "custom": {"sync": {"pause": pause}}}

    class Trainer:
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})

        def get_llm_client(self) -> Any:
            return FullyAsyncLLMServerClient(self.config, only_hybrid=True)

    client = reporting(Trainer)().get_llm_client()
    assert type(client) is kind and client._only_hybrid
    assert type(pickle.loads(pickle.dumps(client))) is kind


def test_clients_of_others_are_left_alone() -> None:
    client = LLMServerClient(OmegaConf.create({}))
    assert of_separate_rollout(client) is client


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (ActorDiedError(), [["first"]]),
        # As Ray raises it here: the driver runs such a sync once more, or ends the run
        (RayTaskError("generate", "", HalfWrittenError("a replica died")).as_instanceof_cause(), []),
    ],
)
def test_what_a_dead_server_or_a_failed_sync_leaves_unanswered_is_asked_again(
    error: Exception, gone: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another server, and the router forgets the one that died."""
    client = client_of([("length", WHOLE)], monkeypatch)
    acquire, asked, removed = LLMServerClient._acquire_server, list[str](), list[list[str]]()

    async def fails(**_: Any) -> TokenOutput:
        asked.append("first")
        raise error

    async def acquired(self: Any, request_id: str, **more: Any) -> tuple[str, Any]:
        if asked:
            return await acquire(self, request_id, **more)
        return "first", SimpleNamespace(generate=SimpleNamespace(remote=fails))

    async def remove(names: list[str]) -> None:
        removed.append(names)

    async def clear() -> None:
        asked.append("cleared")

    monkeypatch.setattr(LLMServerClient, "_acquire_server", acquired)
    client._load_balancer = SimpleNamespace(
        remove_servers=SimpleNamespace(remote=remove), clear_sticky_cache=SimpleNamespace(remote=clear)
    )
    output = asyncio.run(client.generate("request", prompt_ids=[1], sampling_params={}))
    assert output.token_ids == [1] and removed == gone and asked == ["first", *["cleared"] * len(gone)]
