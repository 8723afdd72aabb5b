# SPDX-License-Identifier: Apache-2.0
"""SGLang's own model classes, tiny, on the CPU, in a test process that plays one tensor-parallel rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from contract.sglang_configs import COMMON, CONFIGS

Weights = list[tuple[str, torch.Tensor]]


def config_of(kind: str) -> dict[str, Any]:
    return {**COMMON, **CONFIGS[kind]}


def _mlp(prefix: str, hidden: int, inner: int) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (f"{prefix}gate_proj.weight", (inner, hidden)),
        (f"{prefix}up_proj.weight", (inner, hidden)),
        (f"{prefix}down_proj.weight", (hidden, inner)),
    ]


def _latent_attention(c: dict[str, Any], a: str) -> list[tuple[str, tuple[int, ...]]]:
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    query = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    if c["q_lora_rank"]:
        names = [(f"{a}q_a_proj.weight", (c["q_lora_rank"], hidden)), (f"{a}q_a_layernorm.weight", (c["q_lora_rank"],))]
        names += [(f"{a}q_b_proj.weight", (query, c["q_lora_rank"]))]
    else:
        names = [(f"{a}q_proj.weight", (query, hidden))]
    return [
        *names,
        (f"{a}kv_a_proj_with_mqa.weight", (rank + c["qk_rope_head_dim"], hidden)),
        (f"{a}kv_a_layernorm.weight", (rank,)),
        (f"{a}kv_b_proj.weight", (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank)),
        (f"{a}o_proj.weight", (hidden, heads * c["v_head_dim"])),
    ]


def _attention(c: dict[str, Any], a: str) -> list[tuple[str, tuple[int, ...]]]:
    if "kv_lora_rank" in c:
        return _latent_attention(c, a)
    hidden = c["hidden_size"]
    head = c.get("head_dim", hidden // c["num_attention_heads"])
    queries, keys = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    names: list[tuple[str, tuple[int, ...]]] = [(f"{a}o_proj.weight", (hidden, queries))]
    for part, rows in (("q", queries), ("k", keys), ("v", keys)):
        names.append((f"{a}{part}_proj.weight", (rows, hidden)))
        if c["model_type"] == "qwen2":
            names.append((f"{a}{part}_proj.bias", (rows,)))
        if c["model_type"].startswith("qwen3") and part != "v":
            names.append((f"{a}{part}_norm.weight", (head,)))
    return names


def _feed_forward(c: dict[str, Any], layer: int, p: str) -> list[tuple[str, tuple[int, ...]]]:
    hidden = c["hidden_size"]
    experts = c.get("num_experts") or c.get("n_routed_experts")
    if experts is None or layer < c.get("first_k_dense_replace", 0):
        return _mlp(p, hidden, c["intermediate_size"])
    names: list[tuple[str, tuple[int, ...]]] = [(f"{p}gate.weight", (experts, hidden))]
    if c.get("topk_method") == "noaux_tc":
        names.append((f"{p}gate.e_score_correction_bias", (experts,)))
    for expert in range(experts):
        names += _mlp(f"{p}experts.{expert}.", hidden, c["moe_intermediate_size"])
    if "n_shared_experts" in c:
        names += _mlp(f"{p}shared_experts.", hidden, c["moe_intermediate_size"])
    return names


def shapes_of(kind: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the HF checkpoint."""
    c = config_of(kind)
    names: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (c["vocab_size"], c["hidden_size"]))]
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        names += _attention(c, f"{p}self_attn.") + _feed_forward(c, layer, f"{p}mlp.")
        names += [(f"{p}{norm}_layernorm.weight", (c["hidden_size"],)) for norm in ("input", "post_attention")]
    # a tied head travels too, as FSDP trainers send it: under both of its names
    return [*names, ("model.norm.weight", (c["hidden_size"],)), ("lm_head.weight", names[0][1])]


def weights_of(kind: str, seed: int) -> Weights:
    """A random checkpoint in the dtypes in which SGLang keeps it; the head is tied where it is."""
    generator = torch.Generator().manual_seed(seed)
    made: Weights = []
    for name, shape in shapes_of(kind):
        kept = name.endswith("e_score_correction_bias")
        value = torch.randn(shape, generator=generator)
        made.append((name, value if kept else value.to(torch.bfloat16)))
    if config_of(kind)["tie_word_embeddings"]:
        made[-1] = (made[-1][0], made[0][1])
    return made


def start(folder: Path, kind: str, rank: int, world: int, port: int, tp: int | None = None, **arguments: Any) -> Any:
    """Sets SGLang up for one model in this process (again, if need be); returns its ``ModelConfig``."""
    home = folder / f"{kind}-{rank}"
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.json").write_text(json.dumps(config_of(kind)))
    return start_from(home, rank, world, port, tp=tp, **arguments)


def start_from(
    home: Path,
    rank: int,
    world: int,
    port: int,
    attention: str = "torch_native",
    tp: int | None = None,
    **arguments: Any,
) -> Any:
    """As ``start``, for the model whose ``config.json`` lies in ``home``; with engines of ``tp`` ranks, if given, and
    more of SGLang's arguments."""
    from sglang.srt import distributed
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    args = ServerArgs(
        model_path=str(home), device="cpu", tp_size=tp or world, load_format="dummy", dtype="bfloat16",
        attention_backend=attention, sampling_backend="pytorch", skip_tokenizer_init=True,
        disable_cuda_graph=True, **arguments,
    )  # fmt: skip
    set_global_server_args_for_scheduler(args)
    config = ModelConfig.from_server_args(args)
    if not parallel_state.model_parallel_is_initialized():
        distributed.init_distributed_environment(
            backend="gloo", world_size=world, rank=rank, local_rank=rank,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
        )  # fmt: skip
        honest = torch.distributed.get_world_size
        sizes = lambda group=None: honest(group) if group else _Replicas(world)  # noqa: E731
        with mock.patch.object(torch.distributed, "get_world_size", sizes):
            distributed.initialize_model_parallel(tp or world, expert_model_parallel_size=args.ep_size)
    initialize_dp_attention(args, config)
    initialize_moe_config(args)
    return config


class _Replicas(int):
    """A world of several engines. SGLang makes the groups of each, behind a check that there is only one."""

    __hash__ = int.__hash__

    def __ne__(self, other: object) -> bool:
        return False


def build(config: Any) -> Any:
    """A model as SGLang's scheduler holds it, with rubbish for weights."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    with set_default_torch_dtype(config.dtype), torch.device("cpu"):
        model = _initialize_model(config, LoadConfig(load_format="dummy")).eval()
    poison(model)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
    return model


@torch.no_grad()
def poison(model: torch.nn.Module) -> None:
    """What released memory comes back with."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data.view(torch.uint8).fill_(0x5A)


def held(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor a model holds as parameter, buffer or plain attribute, as bytes."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path, module in model.named_modules():
        found |= {f"{path}.{key}": value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}
    return {name: t.detach().contiguous().reshape(-1).view(torch.uint8) for name, t in found.items() if t.numel()}
