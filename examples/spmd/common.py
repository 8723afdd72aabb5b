# SPDX-License-Identifier: Apache-2.0
"""Holds what both examples share: a random model, one training step, a rollout, and how it is measured and checked."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from verl_sync_plugin import SpmdRollout
from verl_sync_plugin.spmd import Generated

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1},
    "0.5b": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2},
    "1.5b": {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2},
    "7b": {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4},
}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--model-size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the trained parameters")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size of the engine")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps, each followed by a sync")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4, help="of the engine")
    parser.add_argument("--attention-backend", help="SGLang's; without it SpmdRollout's own choice")
    parser.add_argument("--seconds", action="store_true", help="print what each sync cost, as a line of JSON")
    return parser.parse_args()


def start(options: argparse.Namespace) -> tuple[torch.device, PreTrainedModel]:
    """The process group, this rank's device and the same random model on every rank."""
    cuda = torch.cuda.is_available() if options.device == "auto" else options.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    config = Qwen2Config(architectures=["Qwen2ForCausalLM"], tie_word_embeddings=False, **SIZES[options.model_size])
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    return device, model


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def run(options: argparse.Namespace, model: torch.nn.Module, config: Any, device: torch.device) -> None:
    """Syncs, generates, trains, and looks at what comes out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
    greedy = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
    engine = {"attention_backend": options.attention_backend} if options.attention_backend else {}
    memory = options.gpu_memory_utilization
    with SpmdRollout(config, tensor_parallel_size=options.tp, gpu_memory_utilization=memory, engine=engine) as rollout:
        first = sync(rollout, model, options)
        before = rollout.generate(prompts, greedy)
        again = sync(rollout, model, options)
        same = rollout.generate(prompts, greedy)
        assert torch.equal(before.ids, same.ids) and torch.equal(before.log_probs, same.log_probs), "nothing changed"
        for _ in range(options.steps):
            rollout.release_kv()
            rollout.release_weights()
            train_step(model, optimizer, before.ids)
            last = sync(rollout, model, options)
            rollout.resume_kv()
            after = rollout.generate(prompts, greedy)
            assert not torch.equal(before.log_probs, after.log_probs), "the engine has the weights of before the step"
            before = after
        off = (log_probs(model, after) - after.log_probs).abs().max().item()
        for report in (first, again, last):
            assert report.coverage_expected > 0 and report.coverage_missing == 0, "a parameter was left out"
        assert last.replayed_tensors == last.tensors, "the copy plan of the first sync was not used"
    if dist.get_rank() == 0:
        print(f"weights of version {after.version} gave {after.response_ids.tolist()}", flush=True)
        print(f"log-probs of trainer and rollout differ by at most {off:.4f}", flush=True)
    dist.destroy_process_group()


@torch.no_grad()
def log_probs(model: torch.nn.Module, generated: Generated) -> torch.Tensor:
    """Returns log-probabilities by the trainer of the tokens that the rollout chose: float32 of shape ``(N, R)``."""
    positions = (generated.mask.cumsum(1) - 1).clamp(min=0)
    logits = model(generated.ids, generated.mask.long(), positions, use_cache=False).logits
    chosen = torch.log_softmax(logits[:, generated.prompt_ids.shape[1] - 1 : -1].float(), -1)
    return chosen.gather(-1, generated.response_ids[..., None])[..., 0]


def sync(rollout: SpmdRollout, model: torch.nn.Module, options: argparse.Namespace) -> Any:
    """One sync; with ``--seconds`` the last rank to begin starts the clock, and the slowest one stops it."""
    dist.barrier()
    started = time.perf_counter()
    report = rollout.sync_weights(model)
    dist.barrier()
    if options.seconds and dist.get_rank() == 0:
        measured = {
            "version": report.global_steps,
            "seconds": round(time.perf_counter() - started, 4),
            "phase_seconds": round(report.phase_seconds, 4),
            "bytes": report.nbytes,
            "tensors": report.tensors,
            "delivery": report.delivery,
            "manager": report.manager,
            "stages": {name: round(seconds, 4) for name, seconds in report.stages.items()},
        }
        print(json.dumps(measured), flush=True)
    return report
