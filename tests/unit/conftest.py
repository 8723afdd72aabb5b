# SPDX-License-Identifier: Apache-2.0
"""What several unit tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from noting_manager import Manager
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode

from verl_sync_plugin.config.settings import SEPARATE_BACKEND
from verl_sync_plugin.rollouts.sglang.request import TOKEN_VARIABLE, hand_down, new_token
from verl_sync_plugin.rollouts.sglang.server import SyncSGLangHttpServer


@pytest.fixture
def server_with(tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes our real server actor, as verl makes it, on a tokenizer manager instead of launching SGLang."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    hand_down(new_token())

    def make(
        manager: Manager,
        pause: str,
        mode: RolloutMode = RolloutMode.STANDALONE,
        backend: str = SEPARATE_BACKEND,
        node_rank: int = 0,
        had_a_sync: bool = True,
        load_format: str = "dummy",
    ) -> Any:
        engine = CheckpointEngineConfig(backend=backend)
        config = RolloutConfig(
            name="sglang",
            custom={"sync": {"pause": pause}},
            checkpoint_engine=engine,
            load_format=load_format,
            max_model_len=64,
        )
        model = HFModelConfig(path=tiny_model("qwen2"))
        server = SyncSGLangHttpServer(config, model, mode, [], 0, node_rank, 1, "", 0)
        server.tokenizer_manager = manager
        server.guard_requests()
        if had_a_sync:
            server._gate.succeed(server._gate.begin())
        return server

    return make
