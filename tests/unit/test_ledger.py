# SPDX-License-Identifier: Apache-2.0
"""The ledger: on small torch modules, and on SGLang's own Qwen2 with its own ``load_weights``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from verl_sync_plugin.receiver.ledger import Ledger
from verl_sync_plugin.transport.protocol import Coverage


class Small(torch.nn.Module):
    """A parameter pair, a tied head, a fused weight, buffers of both kinds, an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.fused = torch.nn.Parameter(torch.zeros(3, 5, 4))
        self.nothing = torch.nn.Parameter(torch.zeros(0))
        self.register_buffer("kept", torch.zeros(7))
        self.register_buffer("dropped", torch.zeros(7), persistent=False)


def write_all(model: Small) -> None:
    """Writes everything that a checkpoint of ``Small`` holds, in the ways model loaders do."""
    model.embed.weight.data.copy_(torch.ones(6, 4))
    for expert in range(3):
        model.fused.data[expert].copy_(torch.ones(5, 4))
    model.kept.fill_(1)


@torch.no_grad()
def test_full_coverage() -> None:
    model = Small()
    with Ledger(model) as ledger:
        write_all(model)
    # embed, head (tied), fused, kept; neither the empty parameter nor the non-persistent buffer
    assert ledger.coverage() == Coverage(expected=4, missing=())


@torch.no_grad()
def test_nothing_written_names_everything() -> None:
    model = Small()
    with Ledger(model) as ledger:
        _ = model.fused + 1
    assert ledger.coverage().buffers == ("kept",)
    assert set(ledger.coverage().missing) == {
        ("embed.weight", 0, 24),
        ("head.weight", 0, 24),
        ("fused", 0, 60),
        ("kept", 0, 7),
    }


@torch.no_grad()
def test_missing_rows_are_counted() -> None:
    model = Small()
    with Ledger(model) as ledger:
        write_all(model)
    with Ledger(model) as partial:
        model.embed.weight.narrow(0, 0, 4).copy_(torch.ones(4, 4))
        model.embed.weight.narrow(0, 5, 1).fill_(0)
        model.fused[0].copy_(torch.ones(5, 4))
        model.fused[2, :, :2].copy_(torch.ones(5, 2))
        model.kept.fill_(1)
    assert ledger.coverage().missing == ()
    assert partial.coverage().expected == 4
    assert sorted(partial.coverage().missing) == [("embed.weight", 20, 24), ("fused", 30, 60), ("head.weight", 20, 24)]


@torch.no_grad()
def test_same_rows_twice_count_once() -> None:
    model = Small()
    with Ledger(model) as ledger:
        write_all(model)
        model.kept.zero_()
    with Ledger(model) as again:
        for _ in range(3):
            model.fused[1].copy_(torch.ones(5, 4))
    assert ledger.coverage().missing == ()
    assert ("fused", 20, 60) in again.coverage().missing


@torch.no_grad()
def test_write_through_the_tied_name_counts_for_both() -> None:
    model = Small()
    with Ledger(model) as ledger:
        model.head.weight.copy_(torch.ones(6, 4))
    missing = {name for name, _, _ in ledger.coverage().missing}
    assert missing == {"fused", "kept"}


@torch.no_grad()
def test_neighbours_in_one_storage_are_told_apart() -> None:
    storage = torch.zeros(10)
    model = torch.nn.Module()
    model.left = torch.nn.Parameter(storage[:6])
    model.right = torch.nn.Parameter(storage[6:])
    with Ledger(model) as ledger:
        model.left.copy_(torch.ones(6))
    assert ledger.coverage() == Coverage(2, (("right", 0, 4),))


@torch.no_grad()
def test_foreach_copy_is_seen() -> None:
    model = Small()
    targets = [model.embed.weight, model.fused, model.kept]
    with Ledger(model) as ledger:
        torch._foreach_copy_(targets, [torch.ones_like(target) for target in targets])
    assert ledger.coverage().missing == ()


@torch.no_grad()
def test_writes_outside_the_ledger_do_not_count() -> None:
    model = Small()
    ledger = Ledger(model)
    write_all(model)
    assert len(ledger.coverage().missing) == 4


@torch.no_grad()
def test_rows_written_twice_in_different_shapes_do_not_hide_missing_rows() -> None:
    """Overlapping writes must not add up to a false proof of coverage."""
    model = Small()
    with Ledger(model) as ledger:
        write_all(model)
    with Ledger(model) as overlapping:
        model.fused[:2].copy_(torch.ones(2, 5, 4))
        model.fused[0].copy_(torch.ones(5, 4))
    assert ledger.coverage().missing == ()
    assert "fused" in {name for name, _, _ in overlapping.coverage().missing}


@pytest.fixture(scope="module")
def sglang_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.nn.Module]:
    """SGLang's Qwen2 on the CPU, tensor parallel size 1."""
    server_args = pytest.importorskip("sglang.srt.server_args")
    if torch.distributed.is_initialized():
        pytest.skip("this process already has a process group")
    from sglang.srt import distributed
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.models.qwen2 import Qwen2ForCausalLM

    folder: Path = tmp_path_factory.mktemp("qwen2")
    tiny_qwen2().save_pretrained(folder)
    args = server_args.ServerArgs(model_path=str(folder), device="cpu", load_format="dummy")
    server_args.set_global_server_args_for_scheduler(args)
    distributed.init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{folder}/store"
    )
    try:
        distributed.initialize_model_parallel(1)
        config = ModelConfig.from_server_args(args)
        initialize_dp_attention(args, config)
        yield Qwen2ForCausalLM(config.hf_config)
    finally:
        distributed.destroy_model_parallel()
        distributed.destroy_distributed_environment()


def tiny_qwen2() -> torch.nn.Module:
    """The same model as the trainer has it; its vocabulary is no multiple of SGLang's padding."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=67,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config)


def loaded(model: torch.nn.Module, leave_out: str = "") -> Coverage:
    weights = [(name, tensor) for name, tensor in tiny_qwen2().state_dict().items() if name != leave_out]
    with Ledger(model) as ledger:
        model.load_weights(weights)
    return ledger.coverage()


def test_sglang_model_is_fully_covered(sglang_qwen2: torch.nn.Module) -> None:
    coverage = loaded(sglang_qwen2)
    assert coverage.missing == ()
    assert coverage.expected == len(list(sglang_qwen2.named_parameters()))


def test_sglang_model_with_half_a_fused_weight(sglang_qwen2: torch.nn.Module) -> None:
    coverage = loaded(sglang_qwen2, leave_out="model.layers.1.mlp.up_proj.weight")
    assert coverage.missing == (("model.layers.1.mlp.gate_up_proj.weight", 48 * 32, 2 * 48 * 32),)


def test_sglang_model_without_its_embedding(sglang_qwen2: torch.nn.Module) -> None:
    coverage = loaded(sglang_qwen2, leave_out="model.embed_tokens.weight")
    assert [name for name, _, _ in coverage.missing] == ["model.embed_tokens.weight"]
