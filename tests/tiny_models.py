# SPDX-License-Identifier: Apache-2.0
"""Writes the quickstart's tiny checkpoints from this process: a script of its own would import everything again."""

import runpy
from pathlib import Path
from typing import Any

import torch

MAKE_MODEL = Path(__file__).resolve().parent.parent / "examples" / "cpu_quickstart" / "make_model.py"


def write(kind: str, folder: Path, **sizes: int) -> Path:
    """A random checkpoint with tokenizer, as ``make_model.py`` writes it; ``sizes`` replace those of its config."""
    maker: dict[str, Any] = runpy.run_path(str(MAKE_MODEL))
    maker["COMMON"].update(sizes)
    maker["make_tokenizer"]().save_pretrained(folder)
    with torch.random.fork_rng():
        maker["make_model"](kind).save_pretrained(folder)
    return folder
