# SPDX-License-Identifier: Apache-2.0
"""Checks what a script gives to ``SpmdRollout`` before any engine runs: prompts, groups, arguments, refusals."""

from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor
from transformers import Qwen2Config
from worlds import on_ranks

from contract.sources import open_source, raised_alike
from fresh_process import python
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import RolloutError
from verl_sync_plugin.rollouts import LocalSpec, rollout_of
from verl_sync_plugin.spmd import Given, SpmdRollout, SpmdShardingManager, check_places, engine_ranks, request_of
from verl_sync_plugin.transport.agreement import Agreement


def test_importing_the_package_imports_no_torch(tmp_path: Path) -> None:
    code = """
        import sys
        import verl_sync_plugin
        assert not {"torch", "sglang", "verl", "transformers"} & set(sys.modules), "imported too early"
        from verl_sync_plugin import SpmdRollout
        from verl_sync_plugin.spmd import Generated
        assert "torch" in sys.modules and "sglang" not in sys.modules
        try:
            verl_sync_plugin.SpmdRolout
        except AttributeError as error:
            print(error)
    """
    run = python(tmp_path, code)
    assert run.returncode == 0 and "no attribute 'SpmdRolout'" in run.stdout, run.stderr[-2000:]


@on_ranks(1)
def test_a_state_dict_may_hold_a_tied_end_twice_and_is_staged() -> None:
    end, config = torch.rand(8, 4), {"model_type": "qwen2_5_vl", "tie_word_embeddings": True, "text_config": {}}
    end[0] = float("nan")  # which is refused by its name, and not as another plan
    for first, (head, sent) in product(("model.embed_tokens", "wte"), ((end, 1), (end.clone(), 1), (end + 1, 2))):
        given = Given(config)
        given.take({"tower.embed_tokens.weight": end * 2, f"{first}.weight": end, "lm_head.weight": head})
        source = open_source("", given, backend=SpmdShardingManager.backend).agree_on_layout(Agreement(10.0))
        assert len(source.shards()) == 1 + sent and not source.readable_in_place
    given.take({"w": TwoTensor(torch.ones(2), torch.ones(2))})
    assert source.shards()[0].run is None, "a subclass of tensors has no memory that a kernel could read"


@pytest.mark.parametrize(("ids", "sampling", "words"), [
    ([], None, "no prompts"),
    ([[1], []], None, "token_ids[1] has no tokens"),
    ([[1, -2]], None, "not token ids"),
    ([[1.5]], None, "not token ids"),
    (torch.ones(2, 2, dtype=torch.int64), None, "not token ids"),  # what pads it is not known
    ([[1], [2]], [{}], "1 entries for 2 prompts"),
    ([[1]], {"n": 0}, "sampling['n']=0"),
    ([[1]], {"stop": ["x"]}, "Use stop_token_ids"),
    ([[1]], {"json_schema": "{}"}, "needs a tokenizer. Leave it out"),
])  # fmt: skip
def test_what_is_no_prompt_is_refused_by_name(ids: Any, sampling: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        request_of(ids, sampling)
    assert words in str(caught.value)


def test_the_engine_keeps_a_copy_of_what_a_sync_would_not_bring_back() -> None:
    for name, more, copied in (
        ("New", {}, True),
        ("Qwen3Moe", {}, False),
        ("Qwen3Moe", {"moe_runner_backend": "cutlass"}, True),
        ("Qwen3Moe", {"moe_a2a_backend": "flashinfer"}, True),
        ("Qwen3Moe", {"enable_weights_cpu_backup": True}, True),
    ):
        given: Any = "", {"architectures": [f"{name}ForCausalLM"]}, 2, "bfloat16", 0.4, True, True, SyncConfig(), more
        launch = rollout_of("sglang").prepare_local(LocalSpec(*given))
        assert launch.arguments[0]["enable_weights_cpu_backup"] is copied, (name, more)
        assert ("TMS_RETAIN_CPU_BACKUP" in launch.environment) is copied  # it is allocated once


def test_engines_share_no_gpu_and_span_no_hosts() -> None:
    here = [("a", str(number)) for number in range(4)]
    check_places(2, here)
    check_places(2, [("a", "")] * 4)
    for size, places, words in (
        (2, [*here[:3], ("b", "3")], "of ranks 2 to 3 .* launches none on several"),
        (1, [*here[:3], ("a", "0")], "torch.cuda.set_device"),
    ):
        with pytest.raises(ValueError, match=words):
            check_places(size, places)


@on_ranks(4)
def test_neighbours_share_an_engine() -> None:
    rank = torch.distributed.get_rank()
    assert [engine_ranks(size) for size in (1, 2)] == [(rank,), (rank // 2 * 2, rank // 2 * 2 + 1)]
    for size in (3, 0, True):
        with pytest.raises(ValueError, match=f"tensor_parallel_size={size}: use a number that divides the 4"):
            engine_ranks(size)


QWEN2, LLAMA4 = ({"architectures": [f"{name}ForCausalLM"]} for name in ("Qwen2", "Llama4"))
# What each rank gives, the first and the second: the model's config, or None for a folder without one, and arguments
GIVEN: list[tuple[Any, dict[str, tuple[Any, Any]], str]] = [
    (None, {}, "Give a folder with a config.json"),
    ({}, {}, "names no architectures"),
    (QWEN2, {"gpu_memory_utilization": (0.4, 40)}, "rank 1: ValueError: gpu_memory_utilization=40"),
    (QWEN2, {"dtype": ("bfloat16", "float16")}, "the ranks disagree on the arguments"),
    (QWEN2, {"tensor_parallel_size": (1, 2)}, "the ranks disagree on the arguments"),
    (QWEN2, {"sync": (None, {"pause": "in_place"})}, "rank 1: ValueError: sync.pause='in_place'"),
    (QWEN2, {"sync": ({"max_probs_diff": 0.1},) * 2}, "sync.max_probs_diff=0.1"),
    (QWEN2, {"sync": ({"enabled": False},) * 2}, "sync.enabled=False"),
    (QWEN2, {"sync": ({"no_such_key": 1},) * 2}, "no_such_key"),
    (QWEN2, {"sync": (SyncConfig(verify="allways"),) * 2}, "verify='allways'"),
    (QWEN2, {"update_weights_bucket_megabytes": (0, 0)}, "a bucket must hold at least 1 MiB"),
    (QWEN2, {"dtype": ("int8", "int8")}, "dtype='int8': not a dtype"),
    (LLAMA4, {}, "Use another model"),
    (QWEN2, {"engine": ({"tp_size": 4},) * 2}, "engine.tp_size=4: leave it out, and set tensor_parallel_size"),
    (QWEN2, {"engine": ({"quantization": "fp8"},) * 2}, "engine.quantization='fp8': weight sync cannot serve it"),
    (QWEN2, {"engine": ({"dp_size": 2},) * 2}, "engine.dp_size=2"),
    (QWEN2, {"engine": ({"moe_runner_backend": "aiter"},) * 2}, "engine.moe_runner_backend='aiter'"),
]


@on_ranks(2, timeout=180)
def test_what_does_not_fit_or_the_engine_cannot_do_is_every_ranks_error(tmp_path: Path) -> None:
    (folder := tmp_path / str(torch.distributed.get_rank())).mkdir()

    def check(model: Any, given: dict[str, Any], words: str) -> None:
        if model is not None:
            Qwen2Config(**model).save_pretrained(folder)
        assert words in (text := raised_alike(RolloutError, SpmdRollout, folder, **given)), text

    for model, more, words in GIVEN:
        check(model, {key: values[torch.distributed.get_rank()] for key, values in more.items()}, words)
    with mock.patch.object(torch.version, "hip", "6.0"):
        check(QWEN2, {}, "for AMD's GPUs")
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("VERL_PLATFORM")
        check(QWEN2, {}, "set VERL_PLATFORM=cpu for torchrun")


@on_ranks(2)
def test_sources_that_cannot_be_synced_are_refused_by_name() -> None:
    one, two = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    for placement in (Shard(1), Partial(), _StridedShard(0, split_factor=2)):
        given = Given({})
        given.take({"w": DTensor.from_local(torch.ones(4, 3), one, [placement])})
        text = raised_alike(ValueError, open_source("", given, backend=SpmdShardingManager.backend).shards)
        assert "parameter 'w' has placements" in text and "full_tensor()" in text, text
    cut = {"w": DTensor.from_local(torch.ones(4), one, [Shard(0)])}
    cut["v"] = DTensor.from_local(torch.ones(4), two, [Replicate(), Shard(0)])
    fsdp1, half = partial(FullyShardedDataParallel, device_id=torch.device("cpu")), torch.nn.Linear(2, 2)
    half.weight = torch.nn.Parameter(DTensor.from_local(torch.ones(1, 2), two, [Replicate(), Shard(0)]))
    unknown: list[tuple[Any, type[Exception], str]] = [
        (fsdp1(half, ignored_states=[half.weight]), ValueError, "weight are cut over different meshes, or one that"),
        (cut, ValueError, "parameters w, v are cut over different meshes"),
        (SimpleNamespace(engine_config=SimpleNamespace(strategy="torchtitan")), ValueError, "use one of fsdp"),
        ("weights", TypeError, "a str cannot be synced"),
        ({}, TypeError, "empty"),
        ({"w": 1}, TypeError, "something else than tensors"),
        (torch.nn.Linear(2, 2), ValueError, "has no config"),
    ]
    for source, error, words in unknown:
        assert words in raised_alike(error, Given({}).take, source)
    for wrapped, kind in ((DistributedDataParallel, "fsdp2"), (fsdp1, "fsdp")):
        module: Any = torch.nn.Linear(2, 2)
        module.config = SimpleNamespace(model_type="none")
        given.take(torch.compile(wrapped(module)))
        source = open_source("", given, backend=SpmdShardingManager.backend)
        assert given.kind == kind and {shard.base.key for shard in source.shards()} == {"weight", "bias"}
