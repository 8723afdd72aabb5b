# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint that an engine's model rightly leaves alone, each with the reason.

Whatever else the trainer sends and no engine rank uses is an error: the engine would go on with other weights than are
trained. A tied head needs no entry here, for its bytes travel as the embedding's too.
"""

from __future__ import annotations

import re

# (regular expression on the whole HF name, why no byte of it is needed)
SKIPS = ((r".*\.rotary_emb\.inv_freq", "the engine computes rotary frequencies from its configuration"),)


def rightly_skipped(name: str) -> str:
    """Why an engine may leave a tensor of this name alone; empty when it may not."""
    return next((why for pattern, why in SKIPS if re.fullmatch(pattern, name)), "")
