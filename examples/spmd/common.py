# SPDX-License-Identifier: Apache-2.0
"""Holds what both examples share: a random model, one training step, a rollout, and how it is measured and checked."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
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
    folder = tempfile.TemporaryDirectory()
    config.save_pretrained(folder.name)  # a sync brings the weights
    arguments = {"tensor_parallel_size": options.tp, "gpu_memory_utilization": memory, "engine": engine}
    with folder, SpmdRollout(folder.name, **arguments) as rollout:
        first = sync(rollout, model, options)
        before = rollout.generate(prompts, greedy)
        again = sync(rollout, model, options)
        same = rollout.generate(prompts, greedy)
        assert all(map(equal, before, same)), "nothing changed"
        for _ in range(options.steps):
            rollout.release_kv()
            rollout.release_weights()
            train_step(model, optimizer, padded(before, device))
            last = sync(rollout, model, options)
            rollout.resume_kv()
            after = rollout.generate(prompts, greedy)
            assert not all(map(equal, before, after)), "the engine has the weights of before the step"
            before = after
        off = max(difference(model, each, device) for each in after)
        for report in (first, again, last):
            assert report.coverage_expected > 0 and report.coverage_missing == 0, "a parameter was left out"
        assert last.replayed_tensors == last.tensors, "the copy plan of the first sync was not used"
    if dist.get_rank() == 0:
        print(f"weights of version {after[0].version} gave {[each.response_ids for each in after]}", flush=True)
        print(f"log-probs of trainer and rollout differ by at most {off:.4f}", flush=True)
    dist.destroy_process_group()


def equal(one: Generated, other: Generated) -> bool:
    return one.response_ids == other.response_ids and one.log_probs == other.log_probs


def padded(answers: list[Generated], device: torch.device) -> torch.Tensor:
    """Prompts and responses, padded on the right."""
    rows = [torch.tensor(each.prompt_ids + each.response_ids, device=device) for each in answers]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@torch.no_grad()
def difference(model: torch.nn.Module, answer: Generated, device: torch.device) -> float:
    """Returns how far the log-probabilities of a response by the trainer are from the rollout's."""
    ids, start = torch.tensor([answer.prompt_ids + answer.response_ids], device=device), len(answer.prompt_ids)
    logits = model(ids, use_cache=False).logits[0, start - 1 : -1].float()
    chosen = torch.log_softmax(logits, -1).gather(-1, ids[0, start:, None])[:, 0]
    return (chosen.cpu() - torch.tensor(answer.log_probs)).abs().max().item()


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
