# SPDX-License-Identifier: Apache-2.0
"""Plays one trainer rank of the bare-engine tests; each rank runs in a spawned process of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import unmeasured
from bare_engine import trainer
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.sharding_manager import get_sharding_manager
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.trainers.base import take_over

PROMPT = [5, 6, 7, 8, 9, 10]


@dataclass(frozen=True)
class Setup:
    model_path: str  # a tiny HF checkpoint with tokenizer
    strategy: str  # verl's, of the actor
    world: int  # trainer ranks, which is also the engine's tensor-parallel size
    bucket_bytes: int  # small ones make tensors split
    settings: tuple[tuple[str, object], ...] = ()  # for FSDPEngineConfig, or of a Megatron Layout
    logprob_bound: float = 0.06  # how far the engine's may be from transformers', both computed in bfloat16


class Rank:
    """Trainer, manager and (on rank 0) engine of one rank."""

    def __init__(self, setup: Setup, rank: int, folder: Path) -> None:
        self.rank, self.folder, self.setup = rank, folder, setup
        if rank > 0 and setup.strategy == "megatron":
            unmeasured.start()  # the CPU stack corrects Megatron while it is imported
        self.trainer = trainer.build(setup.model_path, setup.strategy, **dict(setup.settings))
        # After the trainer's model: SGLang changes what transformers builds
        from bare_engine.endpoint import BareEngine, endpoint_of

        self.engine = BareEngine(setup.model_path, setup.world) if rank == 0 else None
        unmeasured.start()  # all that is slow to import is there
        self.endpoint = endpoint_of(self.engine, tuple(range(setup.world)))
        take_over(True)
        self.stream, adapter = self.trainer.get_per_tensor_param()  # type: ignore[attr-defined]
        assert adapter is None
        manager_class = get_sharding_manager(self.stream.trainer, "sglang")
        self.manager: ShardingManager = manager_class(
            self.stream.engine,
            self.endpoint,
            SyncConfig(timeout_seconds=60, verify="first"),
            setup.bucket_bytes,
            torch.device("cpu"),
        )
        self.manager.keeps_staging = False  # the engine sleeps between syncs

    def sync(self, version: int, awake: bool = False) -> None:
        """The whole phase: asleep, stage 1, weights, stage 2; or that of an engine that stays awake."""
        if self.engine is not None and not awake:
            self.engine.call(self.engine.release_tags(["kv_cache", "weights"]))
        asyncio.run(self._sync(version, *(([], []) if awake else (["weights"], ["kv_cache"]))))

    async def _sync(self, version: int, first: list[str], rest: list[str]) -> None:
        await self.manager.update_weights(first, version)
        await self.manager.finish(rest)
        await self.manager.endpoint.publish(self.manager.report)

    def check_exact(self, tag: str) -> None:
        """Engine parameters after our sync equal those after SGLang's own load of the same weights from disk."""
        full = trainer.full_state(self.trainer)
        if self.engine is None:
            return
        synced = self.engine.state(self.folder / f"{tag}-synced")
        checkpoint = trainer.save(full, self.setup.model_path, self.folder / f"{tag}-checkpoint")
        off = far(self.engine.generate(PROMPT, 4), checkpoint)
        assert off < self.setup.logprob_bound, off
        self.engine.load_from_disk(str(checkpoint))
        loaded = self.engine.state(self.folder / f"{tag}-loaded")
        for rank, (ours, theirs) in enumerate(zip(synced, loaded, strict=True)):
            different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
            assert ours.keys() == theirs.keys() and not different, f"rank {rank} differs in {different}"

    def close(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()


def far(words: tuple[list[int], list[float]], checkpoint: Path) -> float:
    """How far the log-probabilities of an engine's words are from those of transformers, with a checkpoint."""
    from transformers import AutoModelForCausalLM

    tokens, logprobs = words
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    logits = model(torch.tensor([PROMPT + tokens])).logits[0].float()
    expected = torch.log_softmax(logits, -1)[len(PROMPT) - 1 : -1]
    return max(abs(expected[i, t].item() - p) for i, (t, p) in enumerate(zip(tokens, logprobs, strict=True)))


def run_rank(rank: int, setup: Setup, folder: str, port: int, story: Callable[[Rank], None]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(setup.world), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), SGLANG_CPU_OMP_THREADS_BIND="|".join(map(str, range(setup.world))))
    dist.init_process_group("cpu:gloo", rank=rank, world_size=setup.world)
    member = Rank(setup, rank, Path(folder))
    try:
        story(member)
        dist.barrier()
    finally:
        member.close()
        dist.destroy_process_group()
