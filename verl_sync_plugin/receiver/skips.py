# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint that an engine's model rightly leaves alone, each with the reason.

Whatever else the trainer sends and no engine rank uses is an error: the engine would go on with other weights than are
trained. A tied head needs no entry here, for its bytes travel as the embedding's too.
"""

from __future__ import annotations

import re
from typing import Any

# (regular expression on the whole HF name, why no byte of it is needed)
BEHIND_LAST = "a layer behind the last one predicts further tokens, and the engine's main model has none"
SKIPS = (
    (r".*\.rotary_emb\.inv_freq", "the engine computes rotary frequencies from its configuration"),
    (r"(?:model\.)?mtp(?:_layers)?\..*", BEHIND_LAST),
)

_LAYER = re.compile(r"(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d+)\..*")


def rightly_skipped(name: str, layers: int | None) -> str:
    """Why an engine may leave a tensor alone; empty when it may not.

    Args:
        name: of the tensor.
        layers: of the model, ``None`` when unknown.
    """
    number = _LAYER.fullmatch(name)
    if number is not None and layers is not None and int(number[1]) >= layers:
        return BEHIND_LAST
    return next((why for pattern, why in SKIPS if re.fullmatch(pattern, name)), "")


def layers_of(model: Any) -> int | None:
    """The number of decoder layers that an SGLang model was configured with; ``None`` when it does not say."""
    config = getattr(model, "config", None)
    found = getattr(getattr(config, "text_config", config), "num_hidden_layers", None)
    return found if isinstance(found, int) else None
