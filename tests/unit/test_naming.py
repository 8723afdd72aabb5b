# SPDX-License-Identifier: Apache-2.0
"""Under which names, and in which parts, a trainer's tensors travel."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from verl.workers.engine.fsdp import transformer_impl

from contract.fsdp_models import merging_source, open_source

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 1}
MIXTRAL = AutoConfig.for_model("mixtral", **SIZES, num_local_experts=3)


def loaded(config: PretrainedConfig, folder: Path, kind: Any = AutoModelForCausalLM) -> tuple[Any, set[str]]:
    """A model from a checkpoint, whose names it has then, and these."""
    kind.from_config(config).save_pretrained(folder)
    return kind.from_pretrained(folder), set(load_file(folder / "model.safetensors"))


def sent(source: Any) -> dict[str, torch.Tensor]:
    """Returns what views of the state dict hold."""
    found = {}
    for shard in source.shards():
        for view in shard.base.views:
            strides = view.strides or torch.empty(view.shape, device="meta").stride()
            found[view.name] = shard.local().as_strided(view.shape, strides, view.start)
    return found


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_fused_experts_travel_as_the_checkpoint_has_them(family: str, tmp_path: Path) -> None:
    experts = {"num_local_experts": 4} if family == "mixtral" else {"num_experts": 4, "n_routed_experts": 4}
    groups = {"n_group": 1, "topk_group": 1} if family in ("deepseek_v3", "glm4_moe") else {}
    config = AutoConfig.for_model(
        family, **SIZES, **experts, **groups, num_experts_per_tok=2, moe_intermediate_size=8,
        first_k_dense_replace=1, n_shared_experts=1, head_dim=8,
    )  # fmt: skip
    model, names = loaded(config, tmp_path)
    assert any(".experts.3." in name for name in names)
    found, checkpoint = sent(open_source(model, wire="float32")), load_file(tmp_path / "model.safetensors")
    assert found.keys() == checkpoint.keys()
    assert all(torch.equal(found[name], checkpoint[name]) for name in checkpoint)


def test_what_is_computed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    doubled = lambda pairs, kind: ((name, tensor * 2) for name, tensor in pairs)  # noqa: E731
    monkeypatch.setattr(transformer_impl, "unfuse_moe_params", doubled)
    with pytest.raises(ValueError, match=r"'(\S+)' becomes '\1' by a computation"):
        open_source(AutoModelForCausalLM.from_config(MIXTRAL)).shards()


def test_adapters_and_a_model_from_no_checkpoint_keep_their_names(tmp_path: Path) -> None:
    assert "model.layers.0.mlp.experts.2.up_proj.weight" in sent(open_source(AutoModelForCausalLM.from_config(MIXTRAL)))
    model, names = loaded(MIXTRAL, tmp_path)
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    source = merging_source(get_peft_model(model, config))
    assert sent(source).keys() == names
    assert "model.layers.0.mlp.experts.lora_A.default.weight" in {
        name.removeprefix("base_model.model.") for name in source.factors.shards
    }


@pytest.mark.parametrize("adapted", ["embed_tokens", "lm_head"])
def test_an_adapted_parameter_that_is_tied_under_another_name_is_refused(adapted: str, tmp_path: Path) -> None:
    """The embedding of Qwen2-VL is ``model.language_model.embed_tokens`` in the trainer and travels as another name."""
    config = AutoConfig.for_model("qwen2_vl", text_config=SIZES, vision_config=VISION, tie_word_embeddings=True)
    model, _ = loaded(config, tmp_path, AutoModelForImageTextToText)
    source = merging_source(get_peft_model(model, LoraConfig(r=2, target_modules=[adapted])))
    with pytest.raises(ValueError, match=rf"changes '\S*{adapted}\.weight', but \S+ and \S+ are tied"):
        source.shards()
