# SPDX-License-Identifier: Apache-2.0
"""``examples/data/gsm8k.py`` makes rows that verl's dataset reads and verl's own reward knows; or names the row."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "data" / "gsm8k.py"


@pytest.mark.slow
def test_verl_reads_and_rewards_a_row(tmp_path: Path, tiny_model: Any) -> None:
    import datasets
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.utils.reward_score import default_compute_score

    row = runpy.run_path(str(SCRIPT))["row"]
    made = row("How many did she sell?", "She sold 1,200 + 34 of them.\n#### 1,234", "train", 3)
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_list([made]).to_parquet(str(path))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("qwen2"))
    settings = OmegaConf.create({"max_prompt_length": 512, "cache_dir": str(tmp_path)})
    read = RLHFDataset(str(path), tokenizer, settings)[0]
    assert "How many did she sell?" in str(read["raw_prompt"]) and read["index"] == 3
    truth = read["reward_model"]["ground_truth"]
    assert default_compute_score(read["data_source"], "... so it is\n#### 1234", truth) == 1.0
    assert default_compute_score(read["data_source"], "... so it is\n#### 1235", truth) == 0.0
    with pytest.raises(ValueError, match="test 7"):
        row("?", "no number", "test", 7)
