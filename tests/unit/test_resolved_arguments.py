# SPDX-License-Identifier: Apache-2.0
"""A launched SGLang is judged by what it made of its arguments, with the lists by which given ones are judged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import sglang
from sglang.srt import server_args
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from contract.sglang_models import config_of
from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.rollouts.sglang.script_server import ScriptServer
from verl_sync_plugin.rollouts.sglang.server import SyncSGLangHttpServer

SAID = r"\.moe_runner_backend='flashinfer_trtllm' \(as SGLang resolved it at its launch\): .* set \S+=triton"


@pytest.fixture
def on_blackwell(tmp_path: Path) -> Callable[..., Any]:
    """SGLang's own arguments for a mixture of experts, resolved as on a Blackwell GPU."""
    model = {**config_of("qwen3-moe"), "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(model))

    def resolved(**given: Any) -> Any:
        with mock.patch.object(server_args, "is_sm100_supported", lambda: True):
            return server_args.ServerArgs(
                model_path=str(tmp_path), device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
                disable_cuda_graph=True, **given,
            )  # fmt: skip

    return resolved


def launched(resolved: Any, tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches our server, with verl's launch replaced by what it leaves behind."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    async def launch(self: Any, **_: Any) -> None:
        self.tokenizer_manager = SimpleNamespace(server_args=resolved, generate_request=None)

    monkeypatch.setattr(SGLangHttpServer, "launch_server", launch)
    config = RolloutConfig(name="sglang", max_model_len=64)
    server = SyncSGLangHttpServer(
        config, HFModelConfig(path=tiny_model("qwen2")), RolloutMode.HYBRID, [], 0, 0, 1, "", 0
    )
    asyncio.run(server.launch_server())


def test_experts_that_blackwell_reorders_are_refused_behind_the_launch(
    on_blackwell: Callable[..., Any], tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"engine_kwargs\.sglang" + SAID) as caught:
        launched(on_blackwell(), tiny_model, monkeypatch)
    assert TURN_OFF in str(caught.value)
    launched(on_blackwell(moe_runner_backend="triton"), tiny_model, monkeypatch)


def test_so_is_the_engine_of_a_script(on_blackwell: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(**_: Any) -> Any:
        return SimpleNamespace(tokenizer_manager=SimpleNamespace(server_args=on_blackwell()))

    monkeypatch.setattr(sglang, "Engine", engine)
    with pytest.raises(ValueError, match="^engine" + SAID):
        ScriptServer({}, 60.0, False, False)
