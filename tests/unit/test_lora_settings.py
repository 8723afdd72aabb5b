# SPDX-License-Identifier: Apache-2.0
"""``model.lora.*`` and the flat LoRA keys are one for the FSDP trainers; composed by Hydra in verl's own config."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import verl
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen2Config
from verl.workers.rollout.sglang_rollout.utils import lora_rank_of

from verl_sync_plugin.hooks.driver import settle, settle_trainer
from verl_sync_plugin.lora.peft import build_peft_model, unties_embeddings

CONFIG_DIR = Path(verl.__file__).parent / "trainer" / "config"
MODEL = "actor_rollout_ref.model"
FLAT = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")


@pytest.fixture(scope="module", autouse=True)
def hydra_in_verls_folder() -> Iterator[None]:
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        yield


def settled(*overrides: str, strategy: str = "fsdp2") -> DictConfig:
    """The composed model config as the driver leaves it."""
    rollout = ("actor_rollout_ref.rollout.name=sglang", f"actor_rollout_ref.actor.strategy={strategy}")
    config = compose("ppo_trainer", overrides=[*rollout, f"{MODEL}.lora.merge=True", *overrides])
    settle_trainer(config.actor_rollout_ref)
    settle_trainer(config.actor_rollout_ref)  # a second time changes nothing and finds no conflict
    model: DictConfig = config.actor_rollout_ref.model
    return model


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param((), (0, 16, "all-linear", None, None), id="no-lora"),
        pytest.param(("lora_rank=8",), (8, 16, "all-linear", None, None), id="flat"),
        pytest.param(("lora.rank=8",), (8, 32, "all-linear", None, None), id="block"),
        pytest.param(("lora.rank=8", "lora_rank=8"), (8, 32, "all-linear", None, None), id="both-same"),
        pytest.param(("lora.rank=8", "lora_alpha=5"), (8, 5, "all-linear", None, None), id="mixed"),
        pytest.param(
            ("lora.rank=8", "lora.alpha=64", "lora.target_modules=[q_proj]", "lora.exclude_modules=[v_proj]"),
            (8, 64, ["q_proj"], ["v_proj"], None),
            id="whole-block",
        ),
        pytest.param(
            ("lora.rank=8", "lora.adapter_path=/on/a/worker"),
            (8, 32, "all-linear", None, "/on/a/worker"),
            id="block-adapter-path",
        ),
    ],
)
def test_either_way_gives_the_flat_keys(given: tuple[str, ...], expected: tuple[Any, ...], strategy: str) -> None:
    model = settled(*(f"{MODEL}.{each}" for each in given), strategy=strategy)
    assert tuple(model[key] for key in FLAT) == expected
    assert model.lora.get("peft") is None or given


def test_another_rollout_keeps_its_block_as_it_is() -> None:
    from omegaconf import OmegaConf

    overrides = [f"{MODEL}.lora.rank=8", "actor_rollout_ref.actor.strategy=fsdp2"]
    config = compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.name=vllm", *overrides])
    before = OmegaConf.to_container(config.actor_rollout_ref.model)
    settle(config)
    assert OmegaConf.to_container(config.actor_rollout_ref.model) == before, "stock verl's run was changed"


@pytest.mark.parametrize(
    ("given", "problem", "remedy"),
    [
        (("lora.rank=8", "lora_rank=4"), r"lora.rank=8 and .*lora_rank=4 are both given and differ", "Remove one"),
        (("lora.rank=8", "lora.alpha=5", "lora_alpha=4"), r"lora.alpha=5 and .*lora_alpha=4", "Remove one"),
        (("lora.rank=8", "lora.target_modules=[linear_qkv]"), "Megatron's name", "all-linear"),
        (("lora.rank=8", "lora.type=vlm_lora"), "lora.type='vlm_lora'", "Use lora or dora"),
        (("lora.rank=8", "lora.dropout_position=post"), "dropout_position='post'", "Use 'pre'"),
        (("lora.rank=8", "lora.a2a_experimental=True"), "a2a_experimental=True", "Use False"),
        (("lora.rank=8", "lora.lora_A_init_method=odd"), "lora_A_init_method='odd'", "kaiming or gaussian"),
        (("lora.rank=8", "+lora.peft.use_dra=True"), r"peft.use_dra=True", "Did you mean use_dora"),
        (("lora.rank=8", "+lora.peft.r=4"), r"peft.r=4: has a key of its own", "model.lora.rank"),
        (("lora_adapter_path=/a",), "lora_adapter_path='/a': no LoRA rank", "lora_rank"),
        (("lora.rank=8", "lora.type=dora", "lora.adapter_path=/a"), "brings its own settings", "Remove one"),
    ],
)
def test_what_cannot_be_is_refused(given: tuple[str, ...], problem: str, remedy: str) -> None:
    overrides = [each.replace("lora", f"{MODEL}.lora", 1) for each in given]
    with pytest.raises(ValueError, match=problem) as caught:
        settled(*overrides)
    assert remedy in str(caught.value)


UNSERVABLE = [
    ("+lora.peft.use_rslora=True", "lora.peft.use_rslora=True"),
    ("+lora.peft.use_dora=True", "lora.peft.use_dora=True"),
    ("lora.type=dora", "lora.type='dora'"),
    ("+lora.peft.rank_pattern={v_proj: 2}", "lora.peft.rank_pattern={'v_proj': 2}"),
    ("+lora.peft.alpha_pattern={v_proj: 2}", "lora.peft.alpha_pattern={'v_proj': 2}"),
    ("+lora.peft.modules_to_save=[lm_head]", "lora.peft.modules_to_save=['lm_head']"),
    ("+lora.peft.bias=all", "lora.peft.bias='all'"),
    ("+lora.peft.lora_bias=True", "lora.peft.lora_bias=True"),
    ("+lora.peft.fan_in_fan_out=True", "lora.peft.fan_in_fan_out=True"),
    ("+target_parameters=[mlp.gate.weight]", "target_parameters=['mlp.gate.weight']"),
]


@pytest.mark.parametrize(("given", "said"), UNSERVABLE, ids=[said.partition("=")[0] for _, said in UNSERVABLE])
def test_what_sglang_would_misread_is_refused_before_ray_starts(given: str, said: str) -> None:
    override = f"+{MODEL}.{given[1:]}" if given.startswith("+") else f"{MODEL}.{given}"
    settled(f"{MODEL}.lora.rank=8", override)  # merged it is served
    with pytest.raises(ValueError) as caught:
        settled(f"{MODEL}.lora.rank=8", f"{MODEL}.lora.merge=False", override)
    text = str(caught.value)
    assert f"lora.merge=False: SGLang cannot serve an adapter with {MODEL}.{said}. Set {MODEL}.lora.merge=True" in text


def test_a_plain_adapter_and_settings_without_lora_pass() -> None:
    adapter = f"{MODEL}.lora.merge=False"
    settled(adapter, f"{MODEL}.lora.rank=8", f"{MODEL}.lora.dropout=0.1", f"+{MODEL}.lora.peft.bias=none")
    settled(adapter, f"+{MODEL}.lora.peft.use_rslora=True")


class Model:
    """The fields of verl's ``HFModelConfig`` that concern LoRA, from a composed config."""

    def __init__(self, composed: DictConfig, tied: bool) -> None:
        self.lora = composed.lora
        self.use_shm = False
        self.target_parameters = composed.get("target_parameters")
        self.hf_config = Qwen2Config(
            tie_word_embeddings=tied, vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2,
        )  # fmt: skip
        for key in FLAT:
            setattr(self, key, composed[key])

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)


def test_what_pefts_config_knows_reaches_the_model() -> None:
    composed = settled(
        f"{MODEL}.lora.rank=3", f"{MODEL}.lora.alpha=7", f"{MODEL}.lora.type=dora", f"{MODEL}.lora.dropout=0.25",
        f"{MODEL}.lora.target_modules=[q_proj,v_proj]", f"+{MODEL}.lora.peft.use_rslora=True",
        f"+{MODEL}.lora.peft.rank_pattern={{v_proj: 2}}", f"+{MODEL}.lora.peft.modules_to_save=[lm_head]",
        f"{MODEL}.lora.lora_A_init_method=gaussian",
    )  # fmt: skip
    model = Model(composed, tied=False)
    assert lora_rank_of(model) == 3
    plain = AutoModelForCausalLM.from_config(model.hf_config, dtype=torch.bfloat16)
    adapted = build_peft_model(plain, model)
    assert isinstance(adapted, PeftModel)
    config: Any = adapted.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_dora, config.use_rslora) == (3, 7, True, True)
    assert config.rank_pattern == {"v_proj": 2} and config.lora_dropout == 0.25
    assert config.init_lora_weights == "gaussian" and config.modules_to_save == ["lm_head"]
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert {parameter.dtype for parameter in trained.values()} == {torch.bfloat16}
    assert any("lora_magnitude_vector" in name for name in trained) and any("lm_head" in name for name in trained)
    assert not any(part in name for name in trained for part in ("k_proj", "mlp"))


@pytest.mark.parametrize(
    ("given", "unties"),
    [
        (("lora.target_modules=[embed_tokens,q_proj]",), True),
        (("lora.target_modules=[lm_head]",), True),
        (("lora.target_modules='.*embed_tokens'",), True),
        (("+lora.peft.modules_to_save=[lm_head]",), True),
        # FSDP makes parameters of their own of the factors that PEFT ties
        (("lora.target_modules=[embed_tokens]", "+lora.peft.ensure_weight_tying=True"), True),
        (("+lora.peft.modules_to_save=[embed_tokens]", "+lora.peft.ensure_weight_tying=True"), False),
        (("lora.target_modules=[embed_tokens,q_proj]", "lora.exclude_modules=[embed_tokens]"), False),
        (("lora.target_modules=[q_proj]",), False),
        ((), False),
    ],
)
def test_the_engine_unties_what_the_adapter_makes_different(given: tuple[str, ...], unties: bool) -> None:
    composed = settled(f"{MODEL}.lora.rank=8", *(each.replace("lora", f"{MODEL}.lora", 1) for each in given))
    assert unties_embeddings(Model(composed, tied=True)) is unties
    assert unties_embeddings(Model(composed, tied=False)) is False


def test_without_lora_nothing_is_untied() -> None:
    assert unties_embeddings(Model(settled(), tied=True)) is False


def test_without_lora_peft_is_not_imported() -> None:
    code = "import sys; from verl_sync_plugin.lora import settings; settings.unify({}, {}, None)"
    code += "\nprint('peft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
