# SPDX-License-Identifier: Apache-2.0
"""Megatron sources through verl's default bridge: what arrives is the checkpoint, and after training the bridge's own
export; LoRA is merged on local parts, with the values of the bridge's own merge."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from worlds import run_world

from megatron_cpu import lora, stories
from megatron_cpu.engines import Layout

pytestmark = pytest.mark.usefixtures("bridge_processes")

CASES = [
    ("qwen2", Layout(4, tp=2, pp=2)),
    ("qwen2-tied", Layout(2, pp=2)),  # with virtual stages the bridge itself cannot load a tied model
    ("qwen3-moe", Layout(4, tp=2, pp=2, ep=2, etp=1)),
    ("moonlight", Layout(2, tp=2, ep=2, etp=1)),
    ("deepseek", Layout(2, tp=2)),
]
MORE_CASES = [
    ("qwen2", Layout(1)),
    ("qwen2", Layout(2)),
    ("qwen2", Layout(4, tp=2)),
    ("qwen2", Layout(2, tp=2)),
    ("qwen2", Layout(2, cp=2)),
    ("qwen2", Layout(2, pp=2, vpp=2)),
    ("qwen2-tied", Layout(2, tp=2)),
    ("qwen2-tied", Layout(4, tp=2, pp=2)),
    ("qwen3", Layout(2, tp=2)),
    ("qwen3", Layout(2, pp=2)),
    ("qwen3-moe", Layout(2, ep=2)),
    ("qwen3-moe", Layout(2, tp=2, ep=1, etp=2)),
    ("qwen3-moe", Layout(4, tp=2, ep=2, etp=2)),
    ("moonlight", Layout(4, ep=2, pp=2, vpp=2)),
]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.extended) for case in MORE_CASES)],
    ids=lambda value: str(value),
)
def test_every_tensor_arrives_bit_for_bit(kind: str, layout: Layout, checkpoint: Callable[[str], str]) -> None:
    digests = run_world(layout.world, stories.syncs, checkpoint(kind), layout, timeout=180)
    assert digests[0] == digests[0][: len(digests[0]) // stories.SYNCS] * stories.SYNCS, (
        "the plan must not change while the layout does not"
    )


@pytest.mark.parametrize(("kind", "layout"), [("qwen2-tied", Layout(2, pp=2)), ("qwen3-moe", Layout(2, ep=2))], ids=str)
def test_a_model_whose_conversion_computes_goes_through_the_bridges_stream(
    kind: str, layout: Layout, checkpoint: Callable[[str], str]
) -> None:
    run_world(layout.world, stories.computed_in_the_stream, checkpoint(kind), layout, timeout=120)


@pytest.mark.parametrize("layout", [Layout(2, tp=2), Layout(2, pp=2)], ids=str)
def test_a_rank_that_fails_inside_the_stream_is_everybodys_error_and_recovered_from(
    layout: Layout, checkpoint: Callable[[str], str]
) -> None:
    first, second = run_world(2, stories.failing_in_the_stream, checkpoint("qwen2"), layout, timeout=180)
    for text, seconds in (*first, *second):
        assert "injected into the conversion" in text and "rank 1" in text, text
        assert seconds < 10, "others waited for a rank that had failed"


@pytest.mark.parametrize(
    ("kind", "layout", "fused"),
    [
        ("qwen3-moe", Layout(2, tp=2, ep=2, etp=1), ["self_attention.linear_qkv.layer_norm_weight"]),
        (
            "deepseek",
            Layout(2, tp=2),
            [
                *("mlp.linear_fc1.layer_norm_weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
                "self_attention.linear_kv_up_proj.layer_norm_weight",
            ],
        ),
    ],
    ids=str,
)
def test_names_and_classes_of_transformer_engine_are_read(
    kind: str, layout: Layout, fused: list[str], checkpoint: Callable[[str], str]
) -> None:
    names, _ = run_world(2, stories.syncs_as_transformer_engine, checkpoint(kind), layout, timeout=120)
    assert {f"decoder.layers.0.{name}" for name in fused} <= names


def test_routers_keep_their_dtype_on_a_float32_wire(checkpoint: Callable[[str], str]) -> None:
    run_world(2, stories.syncs, checkpoint("moonlight"), Layout(2, tp=2, ep=2, etp=1), "float32", timeout=120)


@pytest.mark.parametrize(
    ("story", "layout"),
    [(stories.offloaded, Layout(2, tp=2)), (stories.offloaded, Layout(2, pp=2)), (lora.offloaded, Layout(2, tp=2))],
    ids=["tp2", "pp2", "adapter"],
)
def test_offloaded_parameters_are_read_where_they_are(
    story: Callable[..., None], layout: Layout, checkpoint: Callable[[str], str]
) -> None:
    run_world(layout.world, story, checkpoint("qwen2"), layout, timeout=120)


def test_tensors_and_modules_that_are_replaced_are_found(checkpoint: Callable[[str], str]) -> None:
    run_world(2, stories.rearranged, checkpoint("qwen2"), Layout(2, tp=2), timeout=120)


def test_a_padded_vocabulary_arrives_without_its_padding(checkpoint: Callable[[str], str]) -> None:
    assert run_world(2, stories.padded, checkpoint("qwen2"), Layout(2, tp=2), timeout=120) == [192, 192]


def test_what_cannot_be_synced_is_refused_by_name(checkpoint: Callable[[str], str]) -> None:
    first, second = run_world(2, stories.refused, checkpoint("qwen2"), timeout=120)
    assert first == second, "the same error on every rank"
    for text, key in zip(
        first,
        (
            "override_ddp_config.overlap_param_gather=True",
            "actor.megatron.use_megatron_fsdp=True",
            "actor.megatron.qat.enable=True",
            "actor.megatron.vanilla_mbridge=True",
        ),
        strict=True,
    ):
        assert key in text, text


DISAGREEING = {
    "shape": "rank 0: bfloat16 (64, 32), part 1 of 2 along dimension 1; rank 1: bfloat16 (65, 32), part 2 of 2",
    "dtype": "rank 0: bfloat16 (64, 32), part 1 of 2 along dimension 1; rank 1: float32 (64, 32), part 2 of 2",
    "gone": "ranks 0, 1 hold 2048 of 4096 elements of parameter",
}


def test_disagreement_is_one_error_soon_and_recovered_from(checkpoint: Callable[[str], str]) -> None:
    given = checkpoint("qwen2"), Layout(2, tp=2), tuple(DISAGREEING)
    results = run_world(2, stories.disagreeing, *given, timeout=120)
    for said, (text, seconds), (same, others) in zip(DISAGREEING.values(), *results, strict=True):
        assert text == same and max(seconds, others) < 5
        assert "failed at 'matching the layouts of all ranks'; trainer weights are unchanged" in text
        assert "decoder.layers.0.self_attention.linear_proj.weight" in text and said in text


# LoRA


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen2", Layout(4, tp=2, pp=2)),
        pytest.param("qwen2", Layout(2, tp=2), marks=pytest.mark.extended),
        pytest.param("qwen3", Layout(2, pp=2), marks=pytest.mark.extended),
        ("qwen3-moe", Layout(2, ep=2)),
        pytest.param("qwen3-moe", Layout(4, tp=2, pp=2, ep=2, etp=1), marks=pytest.mark.extended),
        pytest.param("qwen2-tied", Layout(2, tp=2), marks=pytest.mark.extended),
    ],
    ids=lambda value: str(value),
)
def test_merged_weights_are_those_of_the_bridge(kind: str, layout: Layout, checkpoint: Callable[[str], str]) -> None:
    changed, *_ = run_world(layout.world, lora.merged, checkpoint(kind), layout, timeout=180)
    assert len(changed) == 4 * (4 + (3 * 4 if "moe" in kind else 3)), "every projection of every layer is adapted"


def test_each_expert_may_have_an_adapter_of_its_own(checkpoint: Callable[[str], str]) -> None:
    work = partial(lora.merged, share_expert_adapters=False)
    changed, *_ = run_world(2, work, checkpoint("qwen3-moe"), Layout(2, ep=2), timeout=180)
    assert sum(".experts." in name for name in changed) == 4 * 3 * 4


@pytest.mark.parametrize("layout", [Layout(2, tp=2, ep=2, etp=1)], ids=str)
def test_latent_attention_and_shared_experts_are_merged(layout: Layout, checkpoint: Callable[[str], str]) -> None:
    work = partial(lora.merged, target_modules=lora.LATENT)
    changed, *_ = run_world(2, work, checkpoint("moonlight"), layout, timeout=180)
    assert {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} <= {name.split(".")[-2] for name in changed}


@pytest.mark.parametrize(
    "layout", [Layout(2, tp=2), pytest.param(Layout(2, pp=2), marks=pytest.mark.extended)], ids=str
)
def test_served_adapters_make_what_the_bridge_merges(layout: Layout, checkpoint: Callable[[str], str]) -> None:
    run_world(2, lora.served, checkpoint("qwen2"), layout, timeout=180)


def test_adapters_of_another_kind_are_merged_by_the_bridge(checkpoint: Callable[[str], str]) -> None:
    run_world(2, lora.canonical, checkpoint("qwen2"), Layout(2, tp=2), timeout=120)


def test_dora_is_refused_by_name(checkpoint: Callable[[str], str]) -> None:
    first, second = run_world(2, lora.refused, checkpoint("qwen2"), timeout=120)
    assert first == second and "model.lora.type='dora' with actor_rollout_ref.actor.strategy=megatron" in first
