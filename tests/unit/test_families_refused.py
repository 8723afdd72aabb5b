# SPDX-License-Identifier: Apache-2.0
"""Models whose trained weights SGLang cannot be given are refused by name, in the driver where it can be known."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from test_hydra_keys import CONFIG_DIR
from transformers import Llama4TextConfig

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.hooks.driver import settle_trainer
from verl_sync_plugin.rollouts.sglang.adapter import SyncServerAdapter
from verl_sync_plugin.rollouts.sglang.refusals import refuse_checkpoint, refuse_family

DENSE = {"mlp_only_layers": [0]}
REFUSED: dict[str, dict[str, Any]] = {
    "Llama4ForCausalLM cannot": {"architectures": ["Llama4ForCausalLM"]},
    "Qwen2MoeForCausalLM with mlp_only_layers=[0] cannot": {"architectures": ["Qwen2MoeForCausalLM"], **DENSE},
    "Qwen3MoeForCausalLM with decoder_sparse_step=2 cannot": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 2,
    },
    "Qwen3VLMoeForConditionalGeneration with mlp_only_layers=[0] cannot": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": DENSE,
    },
    "GptOssForCausalLM with mxfp4 cannot": {
        "architectures": ["GptOssForCausalLM"],
        "quantization_config": {"quant_method": "mxfp4"},
    },
}
SERVED: list[dict[str, Any]] = [
    {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [], "decoder_sparse_step": 1},
    {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": None},
    {"architectures": ["Qwen2ForCausalLM"], **DENSE},
    {"architectures": ["MixtralForCausalLM"], "quantization_config": None},
    {"architectures": None},
    {},
]


@pytest.mark.parametrize("said", REFUSED)
def test_refused_with_key_reason_and_remedy(said: str) -> None:
    with pytest.raises(ValueError) as caught:
        refuse_family("/models/x", REFUSED[said])
    text = str(caught.value)
    assert text.startswith(f"actor_rollout_ref.model.path=/models/x: {said} be synced to SGLang: ") and TURN_OFF in text


@pytest.mark.parametrize("config", SERVED, ids=str)
def test_what_is_plain_is_served(config: dict[str, Any]) -> None:
    refuse_family("/models/x", config)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}"])
def test_what_cannot_be_read_is_left_to_the_first_sync(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    refuse_checkpoint(str(tmp_path))
    refuse_checkpoint("Qwen/Qwen2.5-0.5B")


LAYERS = "actor_rollout_ref.model.override_config.num_hidden_layers"
ARGUMENTS = "actor_rollout_ref.rollout.engine_kwargs.sglang.json_model_override_args"


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        ((f"+{LAYERS}=3",), (3, 2)),
        (("+actor_rollout_ref.model.override_config.model_config.num_hidden_layers=1",), (1, 2)),
        ((f"+{ARGUMENTS}='{{\"num_hidden_layers\": 1}}'",), (2, 1)),
        ((f"+{LAYERS}=3", f"+{ARGUMENTS}='{{\"num_hidden_layers\": 3}}'"), None),
        ((), None),
    ],
)
def test_other_layers_in_trainer_and_engine_are_refused(
    overrides: tuple[str, ...], numbers: tuple[int, int] | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2}))
    model = f"actor_rollout_ref.model.path={tmp_path}"
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        config = compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.name=sglang", model, *overrides])
    if numbers is None:
        settle_trainer(config.actor_rollout_ref)
        return
    said = (
        r"override_(config|args)=.*: the trainer's model has {} layers \(num_hidden_layers\), SGLang's {}\. Change both"
    )
    with pytest.raises(ValueError, match=said.format(*numbers)):
        settle_trainer(config.actor_rollout_ref)


def test_a_worker_refuses_what_the_driver_could_not_read() -> None:
    model = SimpleNamespace(path="org/name", hf_config=Llama4TextConfig(architectures=["Llama4ForCausalLM"]))
    adapter: Any = SimpleNamespace(model_config=model, rollout=SyncServerAdapter.rollout)
    with pytest.raises(ValueError, match=r"model\.path=org/name: Llama4ForCausalLM cannot be synced to SGLang"):
        SyncServerAdapter._refuse_family(adapter)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2", "megatron"])
def test_in_the_driver(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REFUSED["Llama4ForCausalLM cannot"]))
    overrides = ["actor_rollout_ref.rollout.name=sglang", f"actor_rollout_ref.model.path={tmp_path}"]
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        name = "ppo_megatron_trainer" if strategy == "megatron" else "ppo_trainer"
        actor = [] if strategy == "megatron" else [f"actor_rollout_ref.actor.strategy={strategy}"]
        config = compose(name, overrides=[*overrides, *actor])
    with pytest.raises(ValueError, match=r"model\.path=.*Llama4ForCausalLM cannot be synced"):
        settle_trainer(config.actor_rollout_ref)
