# SPDX-License-Identifier: Apache-2.0
"""What of an adapter the driver refuses by key, value and remedy, from files that it can read; and what passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import verl
from hydra import compose, initialize_config_dir
from peft import IA3Config, LoraConfig, PromptTuningConfig, VeraConfig
from transformers import Gemma2Config, LlamaConfig, PretrainedConfig

from verl_sync_plugin.hooks.driver import settle_trainer
from verl_sync_plugin.rollouts.sglang.refusals import ALWAYS_TIED

MODEL = "actor_rollout_ref.model"
SIZES: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def hydra_in_verls_folder() -> Iterator[None]:
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        yield


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Folders with the config of a model."""

    def made(config: type[PretrainedConfig], architecture: str, **settings: Any) -> str:
        folder = tmp_path_factory.mktemp("model")
        config(**SIZES, architectures=[architecture], **settings).save_pretrained(folder)
        return str(folder)

    return made


def settle(*overrides: str, strategy: str = "fsdp2", merge: bool = True) -> None:
    fixed = ("actor_rollout_ref.rollout.name=sglang", f"actor_rollout_ref.actor.strategy={strategy}")
    config = compose(
        "ppo_trainer", overrides=[*fixed, f"{MODEL}.lora.rank=4", f"{MODEL}.lora.merge={merge}", *overrides]
    )
    settle_trainer(config.actor_rollout_ref)


def refusal(*overrides: str, strategy: str = "fsdp2", merge: bool = True) -> str:
    with pytest.raises(ValueError) as caught:
        settle(*overrides, strategy=strategy, merge=merge)
    return str(caught.value)


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("config", [IA3Config, VeraConfig, PromptTuningConfig], ids=lambda config: config.__name__)
def test_an_adapter_that_is_not_lora(config: Any, strategy: str, merge: bool, tmp_path: Path) -> None:
    config(task_type="CAUSAL_LM").save_pretrained(tmp_path)
    for key in ("lora_adapter_path", "lora.adapter_path"):
        text = refusal(f"{MODEL}.{key}={tmp_path}", strategy=strategy, merge=merge)
        assert f"{MODEL}.lora_adapter_path='{tmp_path}' has peft_type={config().peft_type.value}" in text
        assert "Give a LoRA adapter" in text


def test_a_lora_adapter_passes_and_so_does_one_that_is_elsewhere(tmp_path: Path) -> None:
    LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path)
    settle(f"{MODEL}.lora_adapter_path={tmp_path}")
    settle(f"{MODEL}.lora_adapter_path=/on/another/machine")
    (tmp_path / "adapter_config.json").write_text("{")
    settle(f"{MODEL}.lora_adapter_path={tmp_path}")


def test_layer_replication(tmp_path: Path) -> None:
    text = refusal(f"+{MODEL}.lora.peft.layer_replication=[[0,2],[0,2]]")
    assert f"{MODEL}.lora.peft={{'layer_replication': [[0, 2], [0, 2]]}} has layer_replication=" in text
    LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 2), (1, 2)]).save_pretrained(tmp_path)
    text = refusal(f"{MODEL}.lora_adapter_path={tmp_path}")
    assert f"'{tmp_path}' has layer_replication=[[0, 2], [1, 2]]" in text and "without layer_replication" in text


@pytest.mark.parametrize("architecture", sorted(ALWAYS_TIED))
def test_the_embedding_of_what_sglang_always_ties(architecture: str, folder_of: Callable[..., str]) -> None:
    path = f"{MODEL}.path={folder_of(LlamaConfig, architecture, tie_word_embeddings=True)}"
    text = refusal(path, f"{MODEL}.target_modules=[o_proj,embed_tokens]")
    assert f"{MODEL}.target_modules=['o_proj', 'embed_tokens']" in text
    assert f"SGLang's {architecture} " in text and f"{MODEL}.exclude_modules" in text


@pytest.mark.parametrize("tied", [True, False])
def test_either_end_of_what_sglang_always_ties(tied: bool, folder_of: Callable[..., str]) -> None:
    path = f"{MODEL}.path={folder_of(Gemma2Config, 'Gemma2ForCausalLM', tie_word_embeddings=tied)}"
    for given, said in (
        (f"{MODEL}.lora.target_modules=[lm_head]", f"{MODEL}.target_modules=['lm_head']"),
        (f"+{MODEL}.lora.peft.modules_to_save=[lm_head]", f"{MODEL}.lora.peft.modules_to_save=['lm_head']"),
    ):
        text = refusal(path, given, strategy="fsdp")
        assert said in text and "SGLang's Gemma2ForCausalLM " in text


def test_what_leaves_it_tied_passes(folder_of: Callable[..., str]) -> None:
    path = f"{MODEL}.path={folder_of(Gemma2Config, 'Gemma2ForCausalLM')}"
    settle(path)
    settle(path, f"{MODEL}.target_modules=[o_proj,embed_tokens]", f"{MODEL}.exclude_modules=[embed_tokens]")
    one_copy = (f"+{MODEL}.lora.peft.modules_to_save=[embed_tokens]", f"+{MODEL}.lora.peft.ensure_weight_tying=True")
    settle(path, *one_copy)


def test_the_adapter_that_is_loaded_counts_as_well(tmp_path: Path, folder_of: Callable[..., str]) -> None:
    LoraConfig(target_modules=["embed_tokens"]).save_pretrained(tmp_path)
    gemma = folder_of(Gemma2Config, "Gemma2ForCausalLM")
    text = refusal(f"{MODEL}.path={gemma}", f"{MODEL}.lora_adapter_path={tmp_path}")
    assert f"{MODEL}.lora_adapter_path='{tmp_path}': it changes the embedding" in text


UNTIED_ENDS = [
    "target_modules=[o_proj,embed_tokens]",
    "target_modules=[lm_head]",
    "+lora.peft.modules_to_save=[embed_tokens]",
]


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("given", UNTIED_ENDS)
def test_fsdp2_with_an_adapted_end_that_is_not_tied(given: str, merge: bool, folder_of: Callable[..., str]) -> None:
    override = f"+{MODEL}.{given[1:]}" if given.startswith("+") else f"{MODEL}.{given}"
    if "modules_to_save" in given and not merge:
        pytest.skip("SGLang cannot serve it, which is said first")
    untied = f"{MODEL}.path={folder_of(LlamaConfig, 'LlamaForCausalLM', tie_word_embeddings=False)}"
    tied = f"{MODEL}.path={folder_of(LlamaConfig, 'LlamaForCausalLM', tie_word_embeddings=True)}"
    text = refusal(untied, override, merge=merge)
    assert "actor_rollout_ref.actor.strategy=fsdp2: verl shards embedding and head by themselves" in text
    assert (
        "Set actor_rollout_ref.actor.strategy=fsdp with actor_rollout_ref.actor.fsdp_config.use_orig_params=True"
        in text
    )
    settle(untied, override, strategy="fsdp", merge=merge)
    settle(tied, override, merge=merge)
    text = refusal(tied, override, f"+{MODEL}.override_config.tie_word_embeddings=False", merge=merge)
    assert "strategy=fsdp2" in text


def test_fsdp2_with_a_saved_head_passes(folder_of: Callable[..., str]) -> None:
    untied = f"{MODEL}.path={folder_of(LlamaConfig, 'LlamaForCausalLM', tie_word_embeddings=False)}"
    settle(untied, f"+{MODEL}.lora.peft.modules_to_save=[lm_head]")


def test_fsdp2_with_tied_factors(folder_of: Callable[..., str]) -> None:
    tied = f"{MODEL}.path={folder_of(LlamaConfig, 'LlamaForCausalLM', tie_word_embeddings=True)}"
    given = (tied, f"{MODEL}.target_modules=[embed_tokens]", f"+{MODEL}.lora.peft.ensure_weight_tying=True")
    assert "Leave ensure_weight_tying out" in refusal(*given)
    settle(*given, strategy="fsdp")


def test_what_cannot_be_read_here_passes() -> None:
    settle(f"{MODEL}.path=somebody/on-a-hub", f"{MODEL}.target_modules=[lm_head]")


@pytest.mark.parametrize(
    ("targets", "lacks"),
    [
        ("[k_proj,v_proj]", "q_proj, k_proj, v_proj in one, and needs factors of q_proj, too"),
        ("[q_proj,k_proj]", "needs factors of v_proj, too"),
        ("[up_proj,down_proj]", "gate_proj, up_proj in one, and needs factors of gate_proj, too"),
        ("'.*q_proj'", "SGLang takes no pattern"),
    ],
)
@pytest.mark.parametrize("key", ["target_modules", "lora.target_modules"])
def test_modules_of_which_sglang_serves_no_adapter(key: str, targets: str, lacks: str) -> None:
    if targets.startswith("'") and key.startswith("lora."):
        key = "target_modules"
    text = refusal(f"{MODEL}.{key}={targets}", merge=False)
    assert lacks in text and f"{MODEL}.lora.merge=False with {MODEL}.{key}=" in text
    assert f"set {MODEL}.lora.merge=True" in text
    settle(f"{MODEL}.{key}={targets}", merge=True)


@pytest.mark.parametrize("targets", ["[q_proj,v_proj]", "[gate_proj]", "[o_proj]", "all-linear"])
def test_modules_of_which_sglang_serves_an_adapter(targets: str) -> None:
    settle(f"{MODEL}.target_modules={targets}", merge=False)


@pytest.mark.parametrize(
    ("settings", "overrides", "says"),
    [
        (
            {"r": 8},
            (),
            f"{MODEL}.lora_rank=4 with {MODEL}.lora_adapter_path='PATH', which has r=8. Set {MODEL}.lora_rank=8",
        ),
        ({"use_rslora": True}, (), f"{MODEL}.lora_adapter_path='PATH', which has use_rslora=True"),
        ({"target_modules": ["k_proj", "v_proj"]}, (), "needs factors of q_proj, too"),
        (
            {"target_modules": ["q_proj", "v_proj", "o_proj"]},
            (f"{MODEL}.target_modules=[q_proj,v_proj]",),
            f"{MODEL}.target_modules=['q_proj', 'v_proj'] with {MODEL}.lora_adapter_path='PATH', which adapts o_proj",
        ),
    ],
    ids=["rank", "rsLoRA", "no q_proj", "other modules"],
)
def test_an_existing_adapter_that_sglang_cannot_serve(
    settings: dict[str, Any], overrides: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **settings}).save_pretrained(tmp_path)
    given = (f"{MODEL}.lora_adapter_path={tmp_path}", *overrides)
    assert says.replace("PATH", str(tmp_path)) in refusal(*given, merge=False)
    settle(*given, merge=True)


def test_an_existing_adapter_that_sglang_serves(tmp_path: Path) -> None:
    for settings in ({"r": 4}, {"r": 2}, {"target_modules": ".*_proj"}):
        LoraConfig(**{"target_modules": ["q_proj", "v_proj"], **settings}).save_pretrained(tmp_path)
        settle(f"{MODEL}.lora_adapter_path={tmp_path}", f"{MODEL}.lora_rank=8", f"{MODEL}.lora.rank=8", merge=False)
