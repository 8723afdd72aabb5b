# SPDX-License-Identifier: Apache-2.0
"""A script as a user would write one, started by torchrun on two ranks that share one engine; argument: a model."""

import os
import sys
from collections import UserDict
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, PreTrainedModel

from bare_engine.trainer import far_from
from contract.sources import raised_alike
from verl_sync_plugin import SpmdRollout
from verl_sync_plugin.errors import RolloutError, SyncError
from verl_sync_plugin.spmd import Generated

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
BOUND = 0.08  # between SGLang's and transformers' in bfloat16; of other weights they are off by 1 and more
MODEL = sys.argv[1]


def model(seed: int) -> PreTrainedModel:
    """Weights of their own, the same on every rank."""
    made: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return made


def sharded(made: PreTrainedModel) -> torch.nn.Module:
    for layer in made.model.layers:
        fully_shard(layer)
    fully_shard(made)
    return made


def off(generated: list[Generated], expected: torch.nn.Module) -> float:
    """How far the engine's log-probabilities are from those of a whole model."""
    whole = expected.bfloat16()
    return max(far_from(whole, each.prompt_ids, each.response_ids, each.log_probs) for each in generated)


def serves(rollout: SpmdRollout, source: Any, expected: torch.nn.Module) -> list[Generated]:
    """The engine has the source's weights after a sync, and every sync is whole and proven."""
    report = rollout.sync_weights(source)
    assert (report.manager, report.coverage_missing, report.tensors > 20) == ("SpmdShardingManager", 0, True), report
    assert report.coverage_expected > 10 and report.nbytes > 200_000, report
    generated = rollout.generate(PROMPTS, GREEDY)
    assert off(generated, expected) < BOUND, off(generated, expected)
    return generated


class Made(UserDict[str, torch.Tensor]):
    """A mapping that makes its tensors when they are asked for."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return super().__getitem__(name).clone()


def every_source(rollout: SpmdRollout) -> None:
    """FSDP2, FSDP1, DDP, a plain module, state dicts, LoRA: each with other weights than the one before."""
    mesh = init_device_mesh("cpu", (2,))
    serves(rollout, sharded(model(1)), model(1))
    serves(rollout, FullyShardedDataParallel(model(2), device_id=torch.device("cpu")), model(2))
    replicas = DistributedDataParallel(model(3))
    first = serves(rollout, replicas, model(3))
    plain, other = model(4), model(4)
    serves(rollout, plain, model(4))
    plain.lm_head = other.lm_head = model(5).lm_head
    serves(rollout, plain, other)
    serves(rollout, model(5).state_dict(), model(5))
    serves(rollout, torch.compile(model(4)), model(4))
    serves(rollout, Made(model(6).state_dict()), model(6))
    cut = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in model(6).state_dict().items()}
    serves(rollout, cut, model(6))
    again = serves(rollout, replicas, model(3))
    assert [{**vars(each), "version": 10} for each in first] == [vars(each) for each in again]
    rollout.sync_weights(replicas)
    assert rollout.report is not None and rollout.report.replayed_tensors == rollout.report.tensors
    assert rollout.report.staging_bytes == rollout._manager.sender.staging_bytes > 0, "nothing is released"
    same = rollout.generate(PROMPTS, GREEDY)
    assert [vars(each) for each in same] == [{**vars(each), "version": 11} for each in again]
    with_adapter(rollout)


def with_adapter(rollout: SpmdRollout) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        torch.manual_seed(7)
        made = get_peft_model(model(7), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "lora_B" in name:
                    parameter.add_(torch.randn(parameter.shape) * 0.2)
        return made

    whole = adapted().merge_and_unload()
    module = adapted()
    sharded(module.get_base_model())
    fully_shard(module)
    assert off(serves(rollout, module, whole), model(7)) > 4 * BOUND, "the adapter makes no difference"


def generation(rollout: SpmdRollout) -> None:
    """Several responses, of several lengths, and what is refused."""
    both = rollout.generate(PROMPTS, GREEDY)
    assert [(each.prompt_ids, len(each.response_ids), len(each.log_probs), each.finish_reason) for each in both] == [
        (prompt, 6, 6, "length") for prompt in PROMPTS
    ]
    short, long = {**GREEDY, "max_new_tokens": 2}, {**GREEDY, "n": 2}
    uneven = [each.response_ids for each in rollout.generate(PROMPTS, [short, long])]
    assert uneven == [both[0].response_ids[:2], *[both[1].response_ids] * 2]
    sampled = rollout.generate([PROMPTS[0]], {"temperature": 1.0, "max_new_tokens": 12, "n": 4, "ignore_eos": True})
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, sampled)
    assert everyone[0] == everyone[1] and len({tuple(each.response_ids) for each in sampled}) > 1
    rank = dist.get_rank()
    text = raised_alike(RolloutError, rollout.generate, [[5 + rank]], GREEDY)
    assert "the ranks of one engine gave different prompts" in text, text
    text = raised_alike(RolloutError, rollout.generate, PROMPTS if rank == 0 else [[]], GREEDY)
    assert "rank 1: ValueError: token_ids[0] has no tokens" in text and "rank 0" not in text, text
    for prompt, said in (([5] * 300, "rank 0: ValueError"), ([10**6], "token id 1000000: ")):  # longer than the context
        assert said in (text := raised_alike(RolloutError, rollout.generate, [prompt], GREEDY)), text


def memory(rollout: SpmdRollout, source: torch.nn.Module, expected: torch.nn.Module) -> None:
    """Released weights are not generated from, whatever is resumed; a sync brings them back."""
    rollout.release_kv()
    rollout.release_kv()
    assert "memory is released: resume it" in raised_alike(RolloutError, rollout.generate, PROMPTS, GREEDY)
    rollout.release_weights()
    rollout.resume_weights()
    rollout.resume_kv()
    assert "no synced weights: sync weights first" in raised_alike(RolloutError, rollout.generate, PROMPTS, GREEDY)
    rollout.release_weights()
    rollout.release_kv()
    rollout.sync_weights(source)
    assert rollout.report is not None and "resume_weights" in rollout.report.stages
    assert rollout.report.staging_bytes > 0 == rollout._manager.sender.staging_bytes, "given back"
    rollout.resume_kv()
    rollout.reset_weights()
    assert "no synced weights: sync weights first" in raised_alike(RolloutError, rollout.generate, PROMPTS, GREEDY)
    rollout.sync_weights(source)
    assert off(rollout.generate(PROMPTS, GREEDY), expected) < BOUND


def failures(rollout: SpmdRollout, source: torch.nn.Module, expected: torch.nn.Module) -> None:
    """Checks that a failure on one rank fails all, and that the engine generates only after a sync that succeeds."""
    weight = source.model.layers[1].mlp.up_proj.weight
    held = weight.to_local().detach().view(-1)
    kept = held[3].item()
    if dist.get_rank() == 1:
        held[3] = float("nan")
    text = raised_alike(SyncError, rollout.sync_weights, source)
    assert "rank 1: ValueError: parameter 'model.layers.1.mlp.up_proj.weight' holds NaN or Inf" in text, text
    assert "half written" in raised_alike(RolloutError, rollout.generate, PROMPTS, GREEDY)
    held[3] = kept
    serves(rollout, source, expected)
    text = raised_alike(SyncError, rollout.sync_weights, source if dist.get_rank() == 0 else "weights")
    assert "rank 1: TypeError: a str cannot be synced" in text, text
    left_out = {name: tensor for name, tensor in model(8).state_dict().items() if "layers.1.mlp.down_proj" not in name}
    text = raised_alike(SyncError, rollout.sync_weights, left_out)
    assert "model.layers.1.mlp.down_proj.weight" in text, text
    serves(rollout, source, expected)


def started() -> list[psutil.Process]:
    """The engine's process, on the rank that has started it."""
    return [each for each in psutil.Process().children() if any("script_server" in word for word in each.cmdline())]


def engine_is_late(rollout: SpmdRollout, source: torch.nn.Module, expected: torch.nn.Module) -> None:
    """An answer that comes too late stops no later call."""
    rollout.release_weights()
    endpoint = rollout._manager.endpoint
    endpoint.timeout_seconds, bound = 1.0, endpoint.timeout_seconds
    for process in started():
        process.suspend()
    text = raised_alike(SyncError, rollout.sync_weights, source)
    assert "SGLang did not answer within 1 s" in text and "timeout_seconds" in text, text
    for process in started():
        process.resume()
    endpoint.timeout_seconds = bound
    serves(rollout, source, expected)


def main() -> None:
    dist.init_process_group("gloo")
    more = {"max_total_tokens": 2048, "context_length": 256, "max_running_requests": 8}
    rollout = SpmdRollout(MODEL, tensor_parallel_size=2, sync={"timeout_seconds": 60}, engine=more)
    assert "no synced weights: sync weights first" in raised_alike(RolloutError, rollout.generate, PROMPTS, GREEDY)
    every_source(rollout)
    generation(rollout)
    source = sharded(model(9))
    memory(rollout, source, model(9))
    failures(rollout, source, model(9))
    engine_is_late(rollout, source, model(9))
    for process in started():
        process.kill()
    text = raised_alike(RolloutError, rollout.generate, PROMPTS, GREEDY)
    assert "rank 0: RuntimeError: SGLang's process has ended" in text, text
    rollout.close()
    assert "TORCHELASTIC_RUN_ID" in os.environ, "not started by torchrun"
    print(f"rank {dist.get_rank()} has seen it all", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
