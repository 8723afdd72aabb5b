"""Writes a quickstart model whose tensors do not fit a bucket: ``make_larger.py FOLDER [VOCABULARY]``.

A layer's feed-forward matrices take 1028 KiB each, more than the smallest bucket, and the vocabulary is by default an
odd number of rows: with two ranks the tensors are cut unevenly.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

MAKE_MODEL = Path(__file__).resolve().parents[2] / "examples" / "cpu_quickstart" / "make_model.py"
LARGER = {"intermediate_size": 8224, "vocab_size": 331}


def main() -> None:
    """Write the checkpoint to the folder that the command line names."""
    maker: dict[str, Any] = runpy.run_path(str(MAKE_MODEL))
    maker["COMMON"].update(LARGER)
    if len(sys.argv) > 2:
        maker["COMMON"]["vocab_size"] = int(sys.argv[2])
    maker["make_tokenizer"]().save_pretrained(sys.argv[1])
    maker["make_model"]("qwen2").save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
