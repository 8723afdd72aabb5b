# SPDX-License-Identifier: Apache-2.0
"""GSM8K as verl reads it: ``train.parquet`` and ``test.parquet``, from ``openai/gsm8k`` of the Hugging Face Hub.

python examples/data/gsm8k.py ~/data/gsm8k

verl has a script that makes the same files, but its wheel leaves it out. verl's own reward for ``openai/gsm8k`` looks
for the number after ``####``, which is why every prompt asks for it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SOURCE = "openai/gsm8k"
ASKED = 'Let\'s think step by step and output the final answer after "####".'


def row(question: str, answer: str, split: str, index: int) -> dict[str, Any]:
    """One row of the parquet file, with the columns that verl's dataset and its rule rewards read.

    Args:
        question: of the dataset.
        answer: of the dataset: a solution whose last line is ``#### 1,234``.
        split: ``train`` or ``test``.
        index: number of the row in its split.

    Raises:
        ValueError: the answer has no ``####``.
    """
    solution, mark, number = answer.rpartition("####")
    if not mark:
        raise ValueError(f"{SOURCE}, {split} {index}: the answer has no '####': {answer[-80:]!r}")
    return {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {ASKED}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": question, "answer": solution + mark + number},
    }


def main() -> None:
    import datasets

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the parquet files go")
    folder = parser.parse_args().folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for split, data in datasets.load_dataset(SOURCE, "main").items():
        rows = [row(each["question"], each["answer"], split, index) for index, each in enumerate(data)]
        datasets.Dataset.from_list(rows).to_parquet(str(folder / f"{split}.parquet"))
        print(f"{len(rows)} rows in {folder / f'{split}.parquet'}")


if __name__ == "__main__":
    main()
