# SPDX-License-Identifier: Apache-2.0
"""Tiny random vision-language checkpoints with tokenizer and processor, and prompts with images, made by hand."""

from __future__ import annotations

import io
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

import tiny_models

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
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}}
VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 2,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
# Kind: what its configuration has of its own for text and vision; its patches are those of the published models
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # An image of 84 x 56 pixels has two windows
    "qwen2_5_vl": ({}, {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}),
    "qwen3_vl": ({"head_dim": 16}, {"patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}),
}
ROWS = 16


def write(kind: str, folder: Path) -> Path:
    """A random checkpoint with tokenizer and processor.

    Args:
        kind: one of ``KINDS``: transformers' name of the model.
        folder: to be made.
    """
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


def _model(kind: str, common: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    text, vision = KINDS[kind]
    numbers = dict(zip(VISION_TOKENS, tokenizer.convert_tokens_to_ids(VISION_TOKENS), strict=True))
    config = AutoConfig.for_model(
        kind,
        text_config={**common, **MROPE, **text, "tie_word_embeddings": False},
        vision_config={**VISION, **vision},
        tie_word_embeddings=False,
        vision_start_token_id=numbers["<|vision_start|>"],
        vision_end_token_id=numbers["<|vision_end|>"],
        image_token_id=numbers["<|image_pad|>"],
        video_token_id=numbers["<|video_pad|>"],
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        # The default deviation of 0.02 gives nearly equal logits: a wrong weight would hardly show
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    _never_say(model, list(numbers.values()))
    return model


@torch.no_grad()
def _never_say(model: PreTrainedModel, tokens: list[int]) -> None:
    """Makes tokens improbable, since a random model's answer with a placeholder of an image is an error in verl."""
    model.get_input_embeddings().weight[:, 0] = 4.0
    head: Any = model.get_output_embeddings().weight
    head[tokens] = 0.0
    head[tokens, 0] = -8.0


def _processor(kind: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    patch = KINDS[kind][1]["patch_size"]
    cut = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
    images = Qwen2VLImageProcessor(**cut, size={"shortest_edge": 4 * (2 * patch) ** 2, "longest_edge": 1 << 20})
    if kind == "qwen3_vl":
        return Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(**cut), chat_template=CHAT_TEMPLATE)
    return Qwen2_5_VLProcessor(images, tokenizer, Qwen2VLVideoProcessor(**cut), chat_template=CHAT_TEMPLATE)


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
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()
