# SPDX-License-Identifier: Apache-2.0
"""SGLang's own model classes, tiny, on the CPU, in a test process that plays one tensor-parallel rank."""

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from contract.families import EXPERTS, FAMILIES, HEADS, Family

Weights = list[tuple[str, torch.Tensor]]
KINDS: dict[str, Family] = {
    "qwen2": FAMILIES["Qwen2"],
    "qwen2-tied": FAMILIES["Qwen2, tied"],
    "qwen3-moe": Family("qwen3_moe", {**HEADS, **EXPERTS, "num_experts": 8, "moe_intermediate_size": 32}),
    "deepseek-v3": FAMILIES["DeepSeek-V3"],
    "glm4-moe": FAMILIES["GLM-4.5"],
    "gemma2": FAMILIES["Gemma 2"],
    "gemma4-moe": FAMILIES["Gemma 4, MoE"],
}


def built(family: Family) -> Any:
    """transformers' model, without memory."""
    config = AutoConfig.for_model(family.model_type, **family.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.config.architectures = [type(model).__name__]
    return model


def config_of(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(built(KINDS[kind]).config.to_json_string())
    return found


@cache
def shapes_of(kind: str) -> list[tuple[str, torch.Size]]:
    """Names and shapes of the HF checkpoint. A tied head travels too, as FSDP trainers send it: under both names."""
    model = built(KINDS[kind])
    found = {name: tensor.shape for name, tensor in revert_weight_conversion(model, model.state_dict()).items()}
    head = found.pop("lm_head.weight")
    return [*found.items(), ("lm_head.weight", head)]


def weights_of(kind: str, seed: int) -> Weights:
    """A random checkpoint in the dtypes in which SGLang keeps it; the head is tied where it is."""
    generator = torch.Generator().manual_seed(seed)
    made: Weights = []
    for name, shape in shapes_of(kind):
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        made.append((name, torch.randn(shape, generator=generator).to(dtype)))
    if KINDS[kind].config["tie_word_embeddings"]:
        made[-1] = (made[-1][0], dict(made)["model.embed_tokens.weight"])
    return made


def start(folder: Path, kind: str, tp: int | None = None, **arguments: Any) -> Any:
    """Sets SGLang up for one model in this process of a group (again, if need be); returns its ``ModelConfig``."""
    family = KINDS[kind]
    home = folder / f"{family.model_type}-{family.config.get('tie_word_embeddings')}-{dist.get_rank()}"
    built(family).config.save_pretrained(home)
    return start_from(home, tp=tp, **arguments)


def start_from(home: Path, attention: str = "torch_native", tp: int | None = None, **arguments: Any) -> Any:
    """Starts the model whose ``config.json`` lies in ``home``, with engines of ``tp`` ranks and more arguments."""
    from sglang.srt import distributed
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    rank, world = dist.get_rank(), dist.get_world_size()
    args = ServerArgs(
        model_path=str(home), device="cpu", tp_size=tp or world, load_format="dummy", dtype="bfloat16",
        attention_backend=attention, sampling_backend="pytorch", skip_tokenizer_init=True,
        disable_cuda_graph=True, **arguments,
    )  # fmt: skip
    set_global_server_args_for_scheduler(args)
    config = ModelConfig.from_server_args(args)
    if not parallel_state.model_parallel_is_initialized():
        distributed.init_distributed_environment(backend="gloo", world_size=world, rank=rank, local_rank=rank)
        honest = dist.get_world_size
        sizes = lambda group=None: honest(group) if group else _Replicas(world)  # noqa: E731
        with mock.patch.object(dist, "get_world_size", sizes):
            distributed.initialize_model_parallel(tp or world, expert_model_parallel_size=args.ep_size)
    initialize_dp_attention(args, config)
    initialize_moe_config(args)
    return config


class _Replicas(int):
    """A world of several engines. SGLang makes the groups of each, after a check that there is only one."""

    __hash__ = int.__hash__

    def __ne__(self, other: object) -> bool:
        return False


def build(config: Any) -> Any:
    """A model as SGLang's scheduler holds it, with rubbish for weights."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    with set_default_torch_dtype(config.dtype), torch.device("cpu"):
        quantization = _get_quantization_config(config, LoadConfig(load_format="dummy"))
        model = _initialize_model(config, LoadConfig(load_format="dummy"), quantization).eval()
    poison(model)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
    return model


@torch.no_grad()
def poison(model: torch.nn.Module) -> None:
    """Fills the parameters with rubbish, as released memory comes back."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim():  # else SGLang asks what a KV cache's scale is
            parameter.data.view(torch.uint8).fill_(0x5A)


def plain(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that the modules hold which is neither parameter nor buffer, nor a view of one."""
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    every = {f"{path}.{key}": each for path, module in model.named_modules() for key, each in vars(module).items()}
    tensors = {name: each for name, each in every.items() if isinstance(each, torch.Tensor)}
    return {name: each for name, each in tensors.items() if each.untyped_storage()._cdata not in known}


def held(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor a model holds as parameter, buffer or plain attribute, as bytes."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers()), **plain(model)}
    return {name: t.detach().contiguous().reshape(-1).view(torch.uint8) for name, t in found.items() if t.numel()}


def check_same(model: torch.nn.Module, reference: torch.nn.Module, what: str) -> None:
    ours, theirs = held(model), held(reference)
    assert ours.keys() == theirs.keys()
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{what} leaves {different[:8]} other than SGLang's own load does"
