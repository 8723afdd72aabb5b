# SPDX-License-Identifier: Apache-2.0
"""SGLang's own classes of the families in ``ALWAYS_TIED``: told to untie, they still drop the head's weight.

Of those whose tiny models SGLang 0.5.12 builds on a CPU from a config of transformers 5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from contract import sglang_configs
from contract import sglang_models as models
from ports import free_port
from verl_sync_plugin.rollouts.sglang.refusals import ALWAYS_TIED

pytestmark = pytest.mark.slow

TANH = "gelu_pytorch_tanh"
GEMMA = {"head_dim": 16, "attention_bias": False, "hidden_act": TANH, "hidden_activation": TANH}
GEMMA_2 = {"query_pre_attn_scalar": 16, "sliding_window": 64, "attn_logit_softcapping": 50.0}
COHERE = {"layer_norm_eps": 1e-5, "logit_scale": 1.0, "use_qk_norm": False}
COHERE_2 = {"sliding_window": 64, "layer_types": ["full_attention"] * 2}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 128, "layer_norm_epsilon": 1e-5}
TIED: dict[str, dict[str, Any]] = {
    "GemmaForCausalLM": {"model_type": "gemma", **GEMMA},
    "Gemma2ForCausalLM": {"model_type": "gemma2", **GEMMA, **GEMMA_2, "final_logit_softcapping": 30.0},
    "CohereForCausalLM": {"model_type": "cohere", **COHERE},
    "Cohere2ForCausalLM": {"model_type": "cohere2", **COHERE, **COHERE_2},
    "GPT2LMHeadModel": {"model_type": "gpt2", **GPT, "activation_function": "gelu_new"},
    "GPTBigCodeForCausalLM": {"model_type": "gpt_bigcode", **GPT, "activation_function": "gelu", "multi_query": True},
}
FREE: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", "attention_bias": False, "mlp_bias": False},
    "Qwen2ForCausalLM": sglang_configs.QWEN2,
}


def changed_by_a_head(config: Any) -> list[str]:
    """Names of the tensors that a head's weight goes to."""
    model = models.build(config)
    before = {name: tensor.clone() for name, tensor in models.held(model).items()}
    model.load_weights(iter([("lm_head.weight", torch.randn(330, 64, dtype=torch.bfloat16))]))
    return [name for name, tensor in models.held(model).items() if not torch.equal(before[name], tensor)]


def heads(_: int, folder: str, port: int) -> None:
    """One engine rank; entry of a spawned process."""
    with torch.no_grad():
        for name, settings in {**TIED, **FREE}.items():
            sglang_configs.CONFIGS[name] = {"architectures": [name], **settings, "tie_word_embeddings": False}
            changed = changed_by_a_head(models.start(Path(folder), name, 0, 1, port))
            assert changed == ([] if name in ALWAYS_TIED else ["lm_head.weight"]), (name, changed)


def test_told_to_untie_they_have_no_head_of_their_own(tmp_path: Path) -> None:
    assert TIED.keys() <= ALWAYS_TIED.keys() and not FREE.keys() & ALWAYS_TIED.keys()
    port = free_port()
    mp.spawn(heads, args=(str(tmp_path), port), nprocs=1)
