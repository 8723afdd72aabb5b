# SPDX-License-Identifier: Apache-2.0
"""Under which names, and in which parts, a trainer's tensors travel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from verl_sync_plugin.layout.tensors import Base, Member, View
from verl_sync_plugin.lora.peft import LoRAWeight
from verl_sync_plugin.trainers.lora import served_parts
from verl_sync_plugin.trainers.naming import checkpoint_rewrite, hf_views

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def sent(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns what views of the state dict hold."""
    rewrite, found = checkpoint_rewrite(model), {}
    for name, tensor in model.state_dict().items():
        flat = tensor.reshape(-1)
        for view in hf_views(Member(name, tuple(tensor.shape), 0), tensor.dtype, rewrite):
            strides = view.strides or torch.empty(view.shape, device="meta").stride()
            found[view.name] = flat.as_strided(view.shape, strides, view.start)
    return found


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_fused_experts_travel_as_the_checkpoint_has_them(family: str, tmp_path: Path) -> None:
    experts = {"num_local_experts": 4} if family == "mixtral" else {"num_experts": 4, "n_routed_experts": 4}
    groups = {"n_group": 1, "topk_group": 1} if family in ("deepseek_v3", "glm4_moe") else {}
    config = AutoConfig.for_model(
        family, **SIZES, **HEADS, **experts, **groups, num_experts_per_tok=2, moe_intermediate_size=8,
        first_k_dense_replace=1, n_shared_experts=1, head_dim=8,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model, checkpoint = AutoModelForCausalLM.from_pretrained(tmp_path), load_file(tmp_path / "model.safetensors")
    assert any(".experts.3." in name for name in checkpoint)
    found = sent(model)
    assert found.keys() == checkpoint.keys()
    assert all(torch.equal(found[name], checkpoint[name]) for name in checkpoint)


def test_what_is_computed_is_refused() -> None:
    with pytest.raises(ValueError, match="becomes 'x' by a computation"):
        hf_views(Member("x", (2, 2), 0), torch.float32, lambda pairs: ((name, t * 2) for name, t in pairs))


def test_adapters_and_a_model_from_no_checkpoint_keep_their_names() -> None:
    model = MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, num_local_experts=3))
    assert "model.layers.0.mlp.experts.2.up_proj.weight" in sent(model)
    key = "model.layers.0.mlp.experts.lora_A.default.weight"
    assert [name for name, _ in checkpoint_rewrite(model)([(key, torch.empty(2))])] == [key]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("adapted", [0, 1])
def test_tied_parameters_part_under_the_names_of_the_checkpoint(rank: int, turned: bool, adapted: int) -> None:
    """The embedding of Qwen2-VL is ``model.language_model.embed_tokens`` in the trainer and travels as another name."""
    names = ["model.language_model.embed_tokens.weight", "lm_head.weight"]
    sent = ["model.embed_tokens.weight", "lm_head.weight"]
    order = (1, 0) if turned else (0, 1)
    members = tuple(Member(names[each], (4, 2), 0) for each in order)
    views = tuple(View(sent[each], (4, 2), 0, 8) for each in order)
    whole = Base(names[order[0]], "float32", 4, (4, 4), views)
    factors: LoRAWeight = object()  # type: ignore[assignment]
    rest, apart = served_parts(whole, members, rank, {names[adapted]: factors})
    assert [view.name for view in (*rest.base.views, *apart.base.views)] == [sent[each] for each in order]
    assert [member.name for member in rest.members] == [names[order[0]]]
