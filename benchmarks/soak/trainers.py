# SPDX-License-Identifier: Apache-2.0
"""verl's own training engines of one rank, and the sharding managers that bring their weights to a server.

``fsdp2-lora`` merges its adapter on the way, ``fsdp2-lora-served`` has SGLang serve it, ``fsdp2`` and ``megatron`` send
all parameters. ``separate-…`` is one of these with the rollout in another process, on a GPU of its own (``apart.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks import gauges, models
from benchmarks.transfer.rig import one_rank
from benchmarks.transfer.ways import Plugin

SEPARATE = "separate-"
_COLOCATED = ("fsdp2", "fsdp2-lora", "fsdp2-lora-served", "megatron")
KINDS = ("plain", *_COLOCATED, *(SEPARATE + kind for kind in _COLOCATED))
SERVED = "-served"
RANK = 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TIMEOUT_SECONDS = 60.0
_LOCAL_LAYERS: dict[str, Any] = {
    "sequence_parallel": False, "attention_backend": "unfused",
    "gradient_accumulation_fusion": False, "bias_dropout_fusion": False, "apply_rope_fusion": False,
    "masked_softmax_fusion": False, "bias_activation_fusion": False, "persist_layer_norm": False,
}  # fmt: skip
_OF_BRIDGE: dict[str, Any] = {
    "moe_permute_fusion": False, "moe_router_fusion": False, "moe_shared_expert_overlap": False,
    "cross_entropy_loss_fusion": False, "transformer_impl": "local",
}  # fmt: skip


def server_options(kind: str, device: str) -> list[str]:
    """What SGLang's command line needs for a kind of trainer; on a GPU it chooses its own backend, as under verl."""
    if not kind.endswith(SERVED):
        return []
    return [
        "--enable-lora",
        *(("--lora-backend", "torch_native") if device == "cpu" else ()),
        "--max-lora-rank",
        str(RANK),
        "--lora-target-modules",
        *TARGETS,
    ]


def engine(kind: str, model: str, folder: Path, device: str, dtype: str = "fp32") -> Any:
    """verl's training engine with random weights; ``torch.distributed`` has one rank.

    Args:
        kind: of ``KINDS``, not ``plain``.
        model: of ``benchmarks.models.SHAPES``.
        folder: for its checkpoint.
        device: ``cuda`` or ``cpu``.
        dtype: what FSDP2 holds its parameters in; Megatron has bf16 and its optimizer the rest.
    """
    if device == "cuda":
        import torch

        torch.cuda.set_device(0)
        if "megatron" in kind:
            import benchmarks.phase.local_megatron  # noqa: F401
    from verl.trainer.config import CheckpointConfig
    from verl.workers.engine import EngineRegistry

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", RAY_LOCAL_WORLD_SIZE="1")
    models.write_model(model, folder, device)
    strategy = "megatron" if "megatron" in kind else "fsdp2"
    parts = _megatron(folder, device) if strategy == "megatron" else _fsdp2(folder, kind, dtype)
    built = EngineRegistry.new("language_model", strategy, *parts, CheckpointConfig())
    built.initialize()
    return built


def _fsdp2(folder: Path, kind: str, dtype: str) -> tuple[Any, Any, Any]:
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    lora: dict[str, Any] = {}
    if "lora" in kind:
        lora = {"lora_rank": RANK, "target_modules": TARGETS, "lora": {"merge": not kind.endswith(SERVED)}}
    model = HFModelConfig(
        path=str(folder),
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
        **lora,
    )
    config = FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, model_dtype=dtype)
    return model, config, FSDPOptimizerConfig(lr=1e-3, total_training_steps=10)


def _megatron(folder: Path, device: str) -> tuple[Any, Any, Any]:
    import importlib.util

    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig

    bridge = importlib.util.find_spec("megatron.bridge") is not None
    config = McoreEngineConfig(
        sequence_parallel=False,
        vanilla_mbridge=not bridge,
        use_mbridge=True,
        use_remove_padding=False,
        use_dynamic_bsz=False,
        override_ddp_config={"grad_reduce_in_fp32": False},  # nothing is trained, and so the MoE fits 80 GB
        override_transformer_config={
            **_LOCAL_LAYERS,
            **(_OF_BRIDGE if bridge else {}),
            **({"use_cpu_initialization": True} if device == "cpu" else {}),
        },
    )
    optimizer = McoreOptimizerConfig(lr=1e-3, lr_warmup_steps=0, total_training_steps=10)
    return HFModelConfig(path=str(folder), use_remove_padding=False), config, optimizer


class Turned:
    """The weights of an engine, which turn into others and back: its adapter's where it has one, else its head's."""

    def __init__(self, trained: Any) -> None:
        import torch

        modules = trained.module if isinstance(trained.module, list) else [trained.module]
        found = [(name, value) for module in modules for name, value in module.named_parameters()]
        adapted = [value for name, value in found if "lora_B" in name]
        named = dict(found)
        head = next(name for name in named if "lm_head" in name or "output_layer" in name)
        self._turned = [getattr(value, "_local_tensor", value).data for value in adapted or [named[head]]]
        generator = torch.Generator().manual_seed(1)
        for value in self._turned if adapted else []:
            value.copy_(torch.randn(value.shape, generator=generator))

    def turn(self) -> None:
        """At every second call they are what they were."""
        for value in self._turned:
            value.copy_(value.flip(0))


def colocated(trained: Any, server: Any, bucket_mb: int, device: str) -> Plugin:
    """The phase of a colocated trainer, by the sharding manager that a run of verl would have."""
    import torch

    from benchmarks.transfer.endpoint import ServerEndpoint
    from verl_sync_plugin.config.settings import SyncConfig
    from verl_sync_plugin.sharding_manager import get_sharding_manager
    from verl_sync_plugin.trainers import shard_stream as activation

    activation.take_over(True)
    stream, _ = trained.get_per_tensor_param()
    manager = get_sharding_manager(stream.trainer, "sglang")
    config = SyncConfig(timeout_seconds=TIMEOUT_SECONDS)
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    return Plugin(manager(trained, ServerEndpoint(server), config, bucket_mb << 20, where, "bfloat16"))


class Trained:
    """A training engine and a real server: what the soak asks of its rig (``transfer/rig.py`` has the plain one).

    Args:
        kind: of ``KINDS``, not ``plain``.
        trained: verl's training engine.
        server: a ``server.Server``.
        bucket_mb: size of a bucket in MiB.
        work: a folder.
        device: ``cuda`` or ``cpu``.
        stock: see ``apart.Apart``.
        host: likewise.
        delivery: likewise.

    Attributes:
        nbytes: of the last sync.
        tensors: likewise.
        devices: the GPUs whose memory matters.
    """

    def __init__(
        self, kind: str, trained: Any, server: Any, bucket_mb: int, work: Path, device: str, stock: bool = False,
        host: str = "", delivery: str = "",
    ) -> None:  # fmt: skip
        from benchmarks.soak.apart import Apart
        from benchmarks.transfer.endpoint import ADAPTER

        self.server = server
        self._turned = Turned(trained)
        separate = kind.startswith(SEPARATE)
        given = (trained, server, bucket_mb, device)
        self.way = Apart(*given, work, stock, host, delivery) if separate else colocated(*given)
        self._adapter = ADAPTER if kind.endswith(SERVED) else ""
        self.devices = (0, 1) if separate and gauges.gpus() > 1 else (0,)
        self.nbytes = self.tensors = 0

    def other_weights(self) -> None:
        """Turns the trainer's weights into others, and at the next call back into what they were."""
        import torch

        with torch.no_grad():
            self._turned.turn()

    def sync(self) -> dict[str, Any]:
        """One sync of the trainer's weights as they are; its report."""
        report = self.way.sync()
        self.nbytes, self.tensors = report["nbytes"], report["tensors"]
        self.server.adapter = self._adapter  # the endpoint that loads it may be in another process
        return report

    def give_staging_back(self) -> None:
        """See ``Plugin``; of a colocated trainer."""
        self.way.give_staging_back()

    def close(self) -> None:
        self.way.close()

    def processes(self) -> dict[str, list[psutil.Process]]:
        """All whose growth matters."""
        found = {"trainer": [psutil.Process()], "schedulers": self.server.schedulers()}
        rollout = getattr(self.way, "process", None)
        return {**found, "rollout": [psutil.Process(rollout.pid)]} if rollout is not None else found


@contextmanager
def rig(kind: str, model: str, bucket_mb: int, work: Path, device: str) -> Iterator[Trained]:
    """Starts the server and makes the training engine; ends every process below this one."""
    from benchmarks.soak import apart
    from benchmarks.transfer.server import Server

    with one_rank(work, device):
        folder = work / model
        trained = engine(kind, model, folder, device)
        where = apart.second_gpu(device) if kind.startswith(SEPARATE) else {}
        server = Server(folder, device, work / f"{model}-server.log", server_options(kind, device), where)
        try:
            yield Trained(kind, trained, server, bucket_mb, work, device)
        finally:
            server.stop()
