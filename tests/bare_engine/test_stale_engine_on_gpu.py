# SPDX-License-Identifier: Apache-2.0
"""What the canary finds and no comparison of parameters does, on a real engine: captured CUDA graphs that read memory
of before, and weights that the model has derived from others and not derived again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bare_engine.ports import group_port
from bare_engine.stale_loader import DERIVE_NOTHING, MOVE
from benchmarks import models
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.rollouts.sglang.pickling import dumps
from verl_sync_plugin.rollouts.sglang.scoring import score
from verl_sync_plugin.verify.canary import RESPONSE_TOKENS, apart, canary_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

THRESHOLD = SyncConfig().canary_threshold


class Engine:
    """SGLang's engine on a GPU, with CUDA graphs."""

    def __init__(self, model: Path, size: str) -> None:
        import sglang

        self._prompts = canary_prompts(models.SHAPES[size]["vocab_size"])
        self.engine = sglang.Engine(
            model_path=str(model), custom_weight_loader=[MOVE, DERIVE_NOTHING], attention_backend="triton",
            sampling_backend="pytorch", grammar_backend="none", skip_tokenizer_init=True, mem_fraction_static=0.3,
            cuda_graph_max_bs=8, max_running_requests=8, context_length=256, skip_server_warmup=True, log_level="error",
            nccl_port=group_port(),
        )  # fmt: skip

    def _call(self, coroutine: Any) -> Any:
        asyncio.set_event_loop(self.engine.loop)
        return self.engine.loop.run_until_complete(coroutine)

    def spoil(self, loader: str, name: str) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        packed = dumps([(name, torch.empty(0))])
        asked = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[packed], load_format=loader)
        success, message = self._call(self.engine.tokenizer_manager.update_weights_from_tensor(asked, None))
        assert success, message

    def apart(self) -> float:
        """How far its decoding is from its reading of the same tokens, as the canary of a sync asks for it."""
        manager = self.engine.tokenizer_manager
        _, decoded, rescored = self._call(score(manager, self._prompts, RESPONSE_TOKENS, None))
        return apart(rescored, decoded).worst


def written(size: str, folder: Path) -> Path:
    """A random checkpoint of which every weight matters: with the usual deviation of 0.02 a wrong one hardly shows."""
    models.write_tokenizer(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(models.config_of(size), dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


@contextmanager
def running(size: str, folder: Path) -> Iterator[Engine]:
    engine = Engine(written(size, folder), size)
    try:
        yield engine
    finally:
        engine.engine.shutdown()


@pytest.mark.parametrize(
    ("size", "loader", "name"),
    [
        pytest.param("tiny", MOVE, "model.norm.weight", id="a captured graph reads memory of before"),
        pytest.param("tiny-mla", DERIVE_NOTHING, "kv_b_proj.weight", id="derived weights are of before"),
    ],
)
def test_the_canary_finds_what_is_of_before(size: str, loader: str, name: str, tmp_path: Path) -> None:
    with running(size, tmp_path) as engine:
        for _ in range(2):
            assert engine.apart() < THRESHOLD, "of an engine that is whole"
        engine.spoil(loader, name)
        found = engine.apart()
        print(f"{size} {loader}: {found:.4f}")
        assert found > THRESHOLD
