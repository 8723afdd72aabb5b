# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint that SGLang's models rightly leave alone, each with the reason.

Whatever else the trainer sends and no engine rank uses is an error: the engine would go on with other weights than are
trained. A tied head needs no entry here, for its bytes travel as the embedding's too.
"""

from __future__ import annotations

import re
from typing import Any

from verl_sync_plugin.receiver.uses import Skipped

BEHIND_LAST = "a layer behind the last one predicts further tokens, and the engine's main model has none"
BLIND = "the engine was launched without its vision tower (see SGLang's enable_multimodal)"
# (regular expression on the whole HF name, why no byte of it is needed)
SKIPS = (
    (r".*\.rotary_emb\.inv_freq", "the engine computes rotary frequencies from its configuration"),
    (r"(?:model\.)?mtp(?:_layers)?\..*", BEHIND_LAST),
)

_LAYER = re.compile(r"(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d+)\..*")
_VISION = re.compile(r"(?:model\.)?(?:vision_model|multi_modal_projector)\..*")


def skipped_by(model: Any) -> Skipped:
    """What an SGLang model rightly leaves alone, by its configuration.

    Args:
        model: Llama 4 says itself whether it has a vision tower (``has_vision``), which SGLang turns off by default.
    """
    config = getattr(model, "config", None)
    layers = getattr(getattr(config, "text_config", config), "num_hidden_layers", None)
    blind = not getattr(model, "has_vision", True)  # None where nobody has turned it on

    def why(name: str) -> str:
        number = _LAYER.fullmatch(name)
        if number is not None and isinstance(layers, int) and int(number[1]) >= layers:
            return BEHIND_LAST
        if blind and _VISION.fullmatch(name):
            return BLIND
        return next((reason for pattern, reason in SKIPS if re.fullmatch(pattern, name)), "")

    return why
