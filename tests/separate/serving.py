# SPDX-License-Identifier: Apache-2.0
"""Trainer and rollout processes of a separate run whose engines serve the trainer's LoRA adapter themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from bare_engine import trainer
from bare_engine.endpoint import BareEngine
from bare_engine.scenario import PROMPT, _checkpoint
from separate.processes import Trainer
from separate.rollouts import Endpoint, Rollout
from verl_sync_plugin import compat
from verl_sync_plugin.rollouts.sglang.lora import served_settings, summary
from verl_sync_plugin.rollouts.sglang.request import ADAPTER_CHECK, dumps
from verl_sync_plugin.rollouts.sglang.updates import WeightUpdates
from verl_sync_plugin.sync.endpoint import LoadOutcome

RANK, SCALING = 8, 2
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # SGLang fuses some
NAME = "served"


class LoRATrainer(Trainer):
    """A rank of verl's own FSDP2 engine with an adapter that is not merged."""

    def _build(self, model: str) -> object:
        lora = {"lora_rank": RANK, "lora_alpha": RANK * SCALING, "target_modules": TARGETS}
        return trainer.build(model, "fsdp2", lora)

    def sync(self, version: int) -> dict[str, Any]:  # type: ignore[override]
        """Sends; returns the report."""
        stream, _ = self.trainer.get_per_tensor_param()  # type: ignore[attr-defined]
        asyncio.run(self.engine.send_weights(stream, version))
        manager = self.engine._manager
        assert manager is not None
        return manager.report.as_dict()

    @torch.no_grad()
    def train(self, seed: int) -> None:
        """Changes the adapter alone, as training does."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.trainer.module.named_parameters():  # type: ignore[attr-defined]
            if "lora_" in name:
                local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
                local.add_(torch.randn(local.shape, generator=generator, dtype=local.dtype) * 0.1)

    def break_gathering(self) -> None:
        """The next sync cannot read the adapter on this rank."""
        manager = self.engine._manager
        assert manager is not None and manager._adapter_sender is not None
        adapter: Any = manager._adapter_sender._adapter
        honest = adapter.look

        def broken() -> None:
            adapter.look = honest
            raise MemoryError("injected: cannot look")

        adapter.look = broken

    def save(self, folder: Path) -> None:
        """Writes base and adapter, merged by hand, as a checkpoint; collective over the trainer's ranks."""
        from safetensors.torch import save_file

        state = self.trainer.module.state_dict()  # type: ignore[attr-defined]
        full = {n: (t.full_tensor() if isinstance(t, DTensor) else t).float() for n, t in state.items()}
        if dist.get_rank() == 0:
            save_file(_merged(full), _checkpoint(self.model, folder) / "model.safetensors", metadata={"format": "pt"})


def _merged(full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in full.items():
        if "lora_" not in name:
            of = name.replace("base_layer.weight", "{}.default.weight")
            if of != name:
                tensor = tensor + SCALING * full[of.format("lora_B")] @ full[of.format("lora_A")]
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            found[plain] = tensor.to(torch.bfloat16).contiguous()
    return found


class MegatronLoRATrainer(LoRATrainer):
    """A tensor-parallel rank of verl's own Megatron engine with an adapter of Megatron-Bridge."""

    def _build(self, model: str) -> object:
        from megatron_cpu import engines, lora

        world = dist.get_world_size()
        return lora.with_factors(model, engines.Layout(world, tp=world), merge=False)

    @torch.no_grad()
    def train(self, seed: int) -> None:
        """See ``LoRATrainer``; ranks that hold the same factor change it alike."""
        generator = torch.Generator().manual_seed(seed)
        for chunk in self.trainer.module:  # type: ignore[attr-defined]
            for name, parameter in chunk.named_parameters():
                if ".adapter." in name:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.data.add_(noise.to(parameter.dtype) * 0.1)

    def save(self, folder: Path) -> None:
        """Writes what the bridge itself exports, which merges; collective over the trainer's ranks."""
        Trainer.save(self, folder)


class Asking(WeightUpdates):
    """What asks the ranks of a bare engine."""

    def __init__(self, engine: BareEngine) -> None:
        self._bare = engine

    async def _call_loader(self, loader: str, packed: bytes) -> None:
        await self._bare._update(packed, loader, None)


class ServingEndpoint(Endpoint):
    """Has the engine's adapter replaced, as the rollout server does."""

    async def load_adapter(self, config: Any, factors: Any, weight_version: str | None) -> LoadOutcome:
        packed, settings, sent = dumps(factors), served_settings(config, factors), summary(factors)
        await asyncio.to_thread(self._bare().call, self._replace(settings, packed, sent))
        return LoadOutcome(nbytes=len(packed))

    async def _replace(self, settings: Any, packed: bytes, sent: Any) -> None:
        server = Asking(self._bare())
        await server.check_adapter("", sent)
        await compat.replace_adapter(self._bare().engine.tokenizer_manager, NAME, settings, packed)
        await server.check_adapter(NAME, sent)


class ServingRollout(Rollout):
    """A rollout rank and a real SGLang engine that serves an adapter."""

    def _start(self, model: str) -> BareEngine:
        return BareEngine(
            model,
            1,
            loaders=(ADAPTER_CHECK,),
            enable_lora=True,
            max_lora_rank=RANK,
            lora_target_modules=TARGETS,
            lora_backend="torch_native",
        )

    def _endpoint(self) -> Endpoint:
        return ServingEndpoint(self.sglang)

    def generate(self) -> tuple[list[int], list[float]]:
        return self.sglang.generate(PROMPT, 4, NAME)

    def generate_with_base(self) -> tuple[list[int], list[float]]:
        return self.sglang.generate(PROMPT, 4)
