"""verl's own engines, built in a test process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def build(model_path: str, strategy: str, **settings: object) -> object:
    """verl's registered actor engine for ``strategy``, initialized; Megatron's ``settings`` are a ``Layout``'s."""
    if strategy == "megatron":
        from megatron_cpu import engines

        return engines.build(model_path, engines.Layout(dist.get_world_size(), **settings))  # type: ignore[arg-type]
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    model_config = HFModelConfig(
        path=model_path,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
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


@torch.no_grad()
def perturb(engine: object, seed: int, scale: float = 0.05) -> None:
    """Changes every parameter the way an optimizer would: in place, on the local shard."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in (parameter for module in _modules(engine) for parameter in module.parameters()):
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
        local.add_(torch.randn(local.shape, generator=generator, dtype=local.dtype) * scale)


def local_state(engine: object) -> list[torch.Tensor]:
    """A copy of what this rank holds."""
    found = []
    for parameter in (parameter for module in _modules(engine) for parameter in module.parameters()):
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
        found.append(local.detach().clone())
    return found


def full_state(engine: object) -> dict[str, torch.Tensor]:
    """The trainer's weights gathered from its own state dict; collective.

    Not from verl's weight stream: for FSDP1 that moves the model to a numbered device first, which a CPU is not.
    Megatron's is mbridge's own export.
    """
    if isinstance(engine.module, list):  # type: ignore[attr-defined]
        from megatron_cpu import engines

        return engines.stock_export(engine)
    state = engine.module.state_dict()  # type: ignore[attr-defined]
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in state.items()}
