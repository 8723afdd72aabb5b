# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint that SGLang's models rightly leave alone, each with the reason.

Whatever else the trainer sends and no engine rank uses is an error: the engine would go on with other weights than are
trained. A tied head needs no entry here, for its bytes travel as the embedding's too.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

FURTHER_TOKENS = "a layer after the last one predicts further tokens, and the engine's main model has none"
BLIND = "the engine was launched without its vision tower (see SGLang's enable_multimodal)"
# (regular expression on the whole HF name, why no byte of it is needed)
SKIPS = (
    (r".*\.rotary_emb\.inv_freq", "the engine computes rotary frequencies from its configuration"),
    (r"(?:model\.)?mtp(?:_layers)?\..*", FURTHER_TOKENS),
)
# What only a layer has that predicts further tokens: it joins the last hidden state and the next token's embedding
JOINS = "eh_proj.weight"

_LAYER = re.compile(r"((?:language_model\.)?model\.(?:language_model\.)?layers\.\d+\.).*")
_VISION = re.compile(r"(?:model\.)?(?:vision_model|multi_modal_projector)\..*")


def why_skipped(model: Any, name: str, sent: Collection[str]) -> str:
    """Why an SGLang model rightly leaves a tensor alone; empty where it may not.

    Args:
        model: Llama 4 says itself whether it has a vision tower (``has_vision``), which SGLang turns off by default.
        name: of the tensor.
        sent: the names of all tensors. They tell the trainer's own layers from those that predict further tokens,
            which no number of layers does: the engine's may be smaller than the trainer's.
    """
    layer = _LAYER.fullmatch(name)
    if layer is not None and layer[1] + JOINS in sent:
        return FURTHER_TOKENS
    if not getattr(model, "has_vision", True) and _VISION.fullmatch(name):  # None where nobody has turned it on
        return BLIND
    return next((reason for pattern, reason in SKIPS if re.fullmatch(pattern, name)), "")
