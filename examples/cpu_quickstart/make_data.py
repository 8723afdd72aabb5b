# SPDX-License-Identifier: Apache-2.0
"""Writes a small set of sums as verl wants its prompts: ``make_data.py FILE.parquet``."""

import sys
from pathlib import Path
from typing import Any

import pandas as pd

ROWS = 16


def make_row(number: int) -> dict[str, Any]:
    """Make one prompt with its expected answer."""
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{number}+1="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number},
    }


def main() -> None:
    """Write the file that the command line names."""
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame([make_row(number) for number in range(ROWS)]).to_parquet(target)
    print(f"{ROWS} prompts in {target}")


if __name__ == "__main__":
    main()
