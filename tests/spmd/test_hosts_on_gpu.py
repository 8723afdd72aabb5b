# SPDX-License-Identifier: Apache-2.0
"""Broadcasts a model that two ranks of a script share out on two hosts of one GPU: ``several_hosts_on_gpu``."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from several_hosts_on_gpu import play
from verl_sync_plugin import SpmdRollout
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.rollouts import LOCAL, rollout_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

MODEL, BUCKET_MB = "small", 4
ENGINE: dict[str, Any] = {"attention_backend": "triton", "disable_cuda_graph": True, "sampling_backend": "pytorch"}


def change(module: Any, number: int) -> None:
    """Other weights than before, the same in every run."""
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in module.parameters():
            local = parameter.to_local()
            local.add_((torch.randn(local.shape, generator=generator) * 0.05).to(local))


def failing(rollout: Any, module: Any, rank: int) -> str:
    """The second rank cannot pack the third bucket, while segments of the second are on their way."""
    sender = rollout._manager.sender
    honest = sender.pack

    def broken(index: int, slot: int, shards: Any) -> None:
        if rank == 1 and index == 3:
            raise MemoryError("injected: cannot pack")
        honest(index, slot, shards)

    sender.pack = broken
    try:
        rollout.sync_weights(module)
    except SyncError as error:
        return str(error)
    finally:
        sender.pack = honest
    raise AssertionError("the sync has not failed")


def syncs(rank: int, folder: str) -> list[Any]:
    """After each of four syncs, one of which follows a failure: what crossed the network, and what the engine holds."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    made: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    for layer in made.model.layers:
        fully_shard(layer)
    fully_shard(made)
    found = []

    with SpmdRollout(
        folder,
        gpu_memory_utilization=0.2,
        sync={"verify": "always", "timeout_seconds": 60},
        update_weights_bucket_megabytes=BUCKET_MB,
        engine={**ENGINE, "custom_weight_loader": [rollout_of(LOCAL).DIGEST_LOADER]},
    ) as rollout:
        for number in range(4):
            change(made, number)
            if number == 3:
                text = failing(rollout, made, rank)
                assert "rank 1: MemoryError: injected: cannot pack" in text, text
            report = rollout.sync_weights(made)
            assert report.delivery == "broadcast" and report.verified_tensors > 0 and report.buckets > 5, report
            found.append(rollout.digests())
    dist.destroy_process_group()
    return found


def test_weights_are_broadcast(tmp_path: Path) -> None:
    from benchmarks import models

    folder = tmp_path / MODEL
    models.write_model(MODEL, folder, "cuda")
    for found in play(2, syncs, str(folder)):
        assert isinstance(found, list), found
        assert all(found) and found[0] != found[1], "every sync has brought other weights"
