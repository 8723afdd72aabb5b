# SPDX-License-Identifier: Apache-2.0
"""verl's own engines, built in a test process, and what transformers makes of their weights."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from contract.sources import in_a_file

PROMPT = [5, 6, 7, 8, 9, 10]
Words = tuple[list[int], list[float]]  # an engine's answer to the prompt: tokens and their log-probabilities


def build(model_path: str, strategy: str, model: dict[str, Any] | None = None, **settings: object) -> object:
    """Initializes verl's actor engine; ``settings``: FSDP's, or a Megatron ``Layout``'s; ``model``: more of FSDP's."""
    if strategy == "megatron":
        from megatron_cpu import engines

        return engines.build(model_path, engines.Layout(dist.get_world_size(), **settings))  # type: ignore[arg-type]
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    plain = {"use_remove_padding": False, "enable_gradient_checkpointing": False}
    model_config = HFModelConfig(
        path=model_path, override_config={"attn_implementation": "sdpa"}, **plain, **(model or {})
    )
    engine_config = FSDPEngineConfig(strategy=strategy, use_torch_compile=False, **settings)
    optimizer = FSDPOptimizerConfig(lr=1e-2, total_training_steps=10)
    engine = EngineRegistry.new("language_model", strategy, model_config, engine_config, optimizer, CheckpointConfig())
    engine.initialize()
    return engine


def _modules(engine: object) -> list[torch.nn.Module]:
    """Megatron has a list of model chunks, FSDP one module."""
    module = engine.module  # type: ignore[attr-defined]
    return list(module) if isinstance(module, list) else [module]


def _local_weights(engine: object) -> Iterator[torch.Tensor]:
    """Yields this rank's part of all parameters and of router biases, which are buffers."""
    for module in _modules(engine):
        biases = [buffer for name, buffer in module.named_buffers() if name.endswith("expert_bias")]
        for tensor in (*module.parameters(), *biases):
            yield tensor._local_tensor if isinstance(tensor, DTensor) else tensor.data


@torch.no_grad()
def perturb(engine: object, seed: int, scale: float = 0.05) -> None:
    """Changes every weight the way training would: in place, on the local shard."""
    generator = torch.Generator().manual_seed(seed)
    for local in _local_weights(engine):
        local.add_(torch.randn(local.shape, generator=generator, dtype=local.dtype) * scale)


def share(engine: object, folder: Path) -> None:
    """Moves every parameter to a new file, which others can map; those of FSDP1 only before its first sync."""
    for module in _modules(engine):
        for parameter in module.parameters():
            local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
            moved = in_a_file(local, folder)
            if isinstance(parameter, DTensor):
                local.set_(moved)  # type: ignore[call-overload]
            else:
                parameter.data = moved


def local_state(engine: object) -> list[torch.Tensor]:
    return [local.detach().clone() for local in _local_weights(engine)]


def full_state(engine: object) -> dict[str, torch.Tensor]:
    """Gathers weights under a checkpoint's names from the state dict: verl's stream would move FSDP1's to a GPU."""
    if isinstance(engine.module, list):  # type: ignore[attr-defined]
        from megatron_cpu import engines

        return engines.stock_export(engine)
    module: Any = engine.module  # type: ignore[attr-defined]
    state = {n: (t.full_tensor() if isinstance(t, DTensor) else t) for n, t in module.state_dict().items()}
    named = revert_weight_conversion(getattr(module, "_fsdp_wrapped_module", module), state)
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def save(tensors: Mapping[str, torch.Tensor], model_path: str, target: Path) -> Path:
    """Writes a checkpoint like a model's, in bfloat16 but for a router's bias, as published ones are."""
    target.mkdir()
    for file in Path(model_path).iterdir():
        if ".safetensors" not in file.name:
            (target / file.name).write_bytes(file.read_bytes())
    cast = {n: t if n.endswith("e_score_correction_bias") else t.to(torch.bfloat16) for n, t in tensors.items()}
    contiguous = {name: tensor.contiguous() for name, tensor in cast.items()}
    save_file(contiguous, target / "model.safetensors", metadata={"format": "pt"})
    return target


def far(words: Words, checkpoint: Path) -> float:
    """How far the log-probabilities of an engine's words are from those of transformers, with a checkpoint."""
    return far_from(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16), PROMPT, *words)


@torch.no_grad()
def far_from(model: Any, prompt: list[int], tokens: list[int], logprobs: list[float]) -> float:
    """The same of any prompt, with a whole model."""
    expected = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0].float(), -1)[len(prompt) - 1 : -1]
    return max(abs(expected[i, t].item() - p) for i, (t, p) in enumerate(zip(tokens, logprobs, strict=True)))
