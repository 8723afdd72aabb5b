# SPDX-License-Identifier: Apache-2.0
"""``main_ppo`` with vision-language models and images in the prompts, their vision tower trained or frozen."""

import io
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from PIL import Image

import tiny_models
from contract.families import MROPE, QWEN3_VISION, QWEN_VISION
from e2e import checks
from e2e.runs import DUMMY, ROLLOUT, SMALL_BUCKETS, Setup, main_ppo
from fresh_process import folder_with

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1000)]

# What verl's dataset reads images with. SGLang 0.5.12 cannot look at an image with Qwen2.5-VL and transformers 5.9:
# its class calls a rotary embedding of transformers, which takes other arguments since then.
VISION = ("qwen-vl-utils==0.0.14", "av==18.1.0")
PACKAGES = {"qwen2_5_vl": (*VISION, "transformers==5.8.1"), "qwen3_vl": VISION}
CLASSES = {"qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen3_vl": "Qwen3VLForConditionalGeneration"}
PROCESSORS = {
    "qwen2_5_vl": (transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor),
    "qwen3_vl": (transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor),
}
# Model, trainer ranks, whether its tower is frozen
CASES = [("qwen2_5_vl", 1, True), ("qwen2_5_vl", 2, False), ("qwen3_vl", 2, False), ("qwen3_vl", 1, True)]


@pytest.mark.parametrize(("kind", "ranks", "frozen"), CASES)
def test_the_engine_has_the_tower_of_every_step(
    kind: str, ranks: int, frozen: bool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two steps, so three syncs; the engine starts with random weights, so only a sync can bring the tower's."""
    packages, prompts = folder_with(tmp_path_factory, *PACKAGES[kind]), write_prompts(tmp_path / "images.parquet")
    overrides = (
        *(f"data.train_files={prompts}", f"data.val_files={prompts}", "data.max_prompt_length=96"),
        *(DUMMY, SMALL_BUCKETS, f"{ROLLOUT}.custom.sync.verify=always"),
        f"actor_rollout_ref.actor.freeze_vision_tower={frozen}",
    )
    change = "frozen_tower" if frozen else "trained_tower"
    setup = Setup(overrides, ranks, 2, write(kind, tmp_path / "model"), change=change, path=(str(packages),))
    trained = main_ppo(setup, tmp_path_factory.mktemp("run"))
    checks.whole(trained, 2, ranks, model=CLASSES[kind])
    # every tensor has been moved and compared
    for report in trained.reports:
        assert report["coverage_missing"] == 0 and report["not_comparable"] == 0, report
        assert report["verified_tensors"] == report["tensors"] > 50, report
    assert trained.reports[-1]["replayed_tensors"] == trained.reports[-1]["tensors"], trained.reports
    # the tower is trained unless it is frozen
    assert len(trained.matching(r"\[e2e\] language: [1-9]\d* of \d+ parameters changed")) == 2 * ranks, trained.tail
    changed = r"0 of \d+" if frozen else r"[1-9]\d* of \d+"
    assert len(trained.matching(rf"\[e2e\] tower: {changed} parameters changed")) == 2 * ranks, trained.tail


VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
# As Qwen's own: an image is one placeholder, which the processor repeats for each of its tokens
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Kind: what its configuration has of its own for text and vision; its patches are those of the published models
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # An image of 84 x 56 pixels has two windows
    "qwen2_5_vl": ({}, {**QWEN_VISION, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}),
    "qwen3_vl": ({"head_dim": 16}, {**QWEN3_VISION, "patch_size": 16}),
}
ROWS = 16


def write(kind: str, folder: Path) -> Path:
    """A tiny random checkpoint with tokenizer and processor, of one of ``KINDS``."""
    maker: dict[str, Any] = runpy.run_path(str(tiny_models.MAKE_MODEL))
    maker["SPECIAL_TOKENS"].extend(VISION_TOKENS)
    tokenizer = maker["make_tokenizer"]()
    tokenizer.add_special_tokens({"additional_special_tokens": VISION_TOKENS}, replace_extra_special_tokens=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _model(kind, maker["COMMON"], tokenizer)
    model.save_pretrained(folder)
    _processor(kind, tokenizer).save_pretrained(folder)
    return folder


def _model(kind: str, common: dict[str, Any], tokenizer: Any) -> transformers.PreTrainedModel:
    text, vision = KINDS[kind]
    untied, numbers = {"tie_word_embeddings": False}, tokenizer.convert_tokens_to_ids(VISION_TOKENS)
    named = dict(zip(("vision_start", "vision_end", "image", "video"), numbers, strict=True))
    special = {f"{name}_token_id": number for name, number in named.items()}
    text = {**common, **MROPE, **text, **untied}
    config = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=vision, **untied, **special)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        # The default deviation of 0.02 gives nearly equal logits: a wrong weight would hardly show
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    _never_say(model, numbers)
    return model


@torch.no_grad()
def _never_say(model: transformers.PreTrainedModel, tokens: list[int]) -> None:
    """Makes tokens improbable, since a random model's answer with a placeholder of an image is an error in verl."""
    model.get_input_embeddings().weight[:, 0] = 4.0
    head: Any = model.get_output_embeddings().weight
    head[tokens] = 0.0
    head[tokens, 0] = -8.0


def _processor(kind: str, tokenizer: Any) -> Any:
    (whole, videos), patch = PROCESSORS[kind], KINDS[kind][1]["patch_size"]
    cut = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
    size = {"shortest_edge": 4 * (2 * patch) ** 2, "longest_edge": 1 << 20}
    images = transformers.Qwen2VLImageProcessor(**cut, size=size)
    return whole(images, tokenizer, videos(**cut), chat_template=CHAT_TEMPLATE)


def write_prompts(file: Path) -> Path:
    """Questions about random images of two sizes, as verl wants them; every fourth row has two images."""
    random = np.random.default_rng(0)
    pd.DataFrame([_row(number, random) for number in range(ROWS)]).to_parquet(file)
    return file


def _row(number: int, random: np.random.Generator) -> dict[str, Any]:
    shapes = [(56, 84), (64, 64)][: 2 if number % 4 == 0 else 1]
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "<image>" * len(shapes) + f"{number}+1="}],
        "images": [{"bytes": _png(random.integers(0, 256, (*shape, 3), np.uint8))} for shape in shapes],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number},
    }


def _png(pixels: np.ndarray) -> bytes:
    """An image as a file; ``pixels`` is [height, width, 3] of uint8."""
    Image.fromarray(pixels).save(file := io.BytesIO(), "png")
    return file.getvalue()
