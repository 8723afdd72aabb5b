# SPDX-License-Identifier: Apache-2.0
"""Mistyped keys and values end in the driver, with key, value and remedy: none is taken for another, and none waits for
a worker to fail on it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import hydra_run
from hydra_run import refused, rollout_of
from verl_sync_plugin.config.settings import KEY_PREFIX, LONG_BUCKET_KEY

CUSTOM = "actor_rollout_ref.rollout.custom"
LORA = "actor_rollout_ref.model.lora"
PEFT = f"{LORA}.peft"
MODEL = "actor_rollout_ref.model"
ADAPTED = (f"{LORA}.rank=8", f"{LORA}.merge=True")


@pytest.fixture
def no_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "scipy" else find(name, *rest))


@pytest.mark.usefixtures("no_scipy")
@pytest.mark.parametrize(
    ("override", "shown", "remedy"),
    [
        # values of PEFT's, by the types of its LoraConfig
        (f"+{PEFT}.use_rslora='\"false\"'", f"{PEFT}.use_rslora='\"false\"': PEFT takes bool", "Correct"),
        (f"+{PEFT}.use_dora=off", f"{PEFT}.use_dora='off': PEFT takes bool", "Correct"),
        (f"+{PEFT}.bias=lora", f"{PEFT}.bias='lora': PEFT takes ", "Did you mean lora_only?"),
        (f"+{PEFT}.rank_pattern=[2]", f"{PEFT}.rank_pattern=[2]: PEFT takes dict[str, int]", "Correct"),
        (f"+{PEFT}.rank_pattern={{q_proj: two}}", f"{PEFT}.rank_pattern={{'q_proj': 'two'}}: PEFT takes ", "Correct"),
        (f"+{PEFT}.alpha_pattern={{q_proj: nan}}", f"{PEFT}.alpha_pattern={{'q_proj': nan}}: PEFT takes ", "Correct"),
        (f"+{PEFT}.modules_to_save=lm_head", f"{PEFT}.modules_to_save='lm_head': PEFT takes ", "Use [lm_head]"),
        (f"+{PEFT}.init_lora_weights=pisa", f"{PEFT}.init_lora_weights='pisa': PEFT takes ", "Did you mean pissa?"),
        (f"+{PEFT}.init_lora_weights=pissa_niter_x", f"{PEFT}.init_lora_weights='pissa_niter_x': ", "Correct"),
        (f"+{PEFT}.init_lora_weights=eva", f"{PEFT}.init_lora_weights='eva': PEFT needs data for it", "Use"),
        (f"+{PEFT}.init_lora_weights=loftq", f"{PEFT}={{'init_lora_weights': 'loftq'}}: PEFT refuses it: ", "scipy"),
        (f"{LORA}.dropout=some", f"{LORA}.dropout='some': PEFT takes float", "Correct"),
        (f"{MODEL}.target_modules=5", f"{MODEL}.target_modules=5: PEFT takes ", "Correct"),
        # regular expressions
        (f"{MODEL}.target_modules='('", f"{MODEL}.target_modules='(': not a regular expression", "Correct the pattern"),
        (f"{LORA}.target_modules='('", f"{LORA}.target_modules='(': not a regular expression", "Correct the pattern"),
        (f"{MODEL}.exclude_modules='('", f"{MODEL}.exclude_modules='(': not a regular expression", "Correct"),
        (f"+{PEFT}.layers_pattern=['(']", f"{PEFT}.layers_pattern=['(']: not a regular expression", "Correct"),
        # other values
        (f"+{PEFT}=[a]", f"{PEFT}=['a']: not a mapping", f"{PEFT}.<key>="),
        (f"{LORA}.alpha=nan", f"{LORA}.alpha=nan: not a number", "for example"),
        (f"{MODEL}.lora_alpha=inf", f"{MODEL}.lora_alpha=inf: not a number", "for example"),
        (f"{LORA}.rank=null", f"{LORA}.rank=None: not a whole number", "for example"),
        (f"{MODEL}.lora_rank=null", f"{MODEL}.lora_rank=None: not a whole number", "for example"),
        (f"{MODEL}.lora_adapter_path=/nope", f"{MODEL}.lora_adapter_path='/nope': there is no such folder", "Give the"),
        (f"{LORA}.adapter_path=./nope", f"{MODEL}.lora_adapter_path='./nope': there is no such folder", "Give the"),
        (f"{LONG_BUCKET_KEY}=True", f"{LONG_BUCKET_KEY}=True: not a whole number of MiB", f"{LONG_BUCKET_KEY}=512"),
        (f"{LONG_BUCKET_KEY}=-1", f"{LONG_BUCKET_KEY}=-1: a bucket must hold at least 1", f"{LONG_BUCKET_KEY}=512"),
        # keys
        *[
            (f"+{CUSTOM}.{key}.enabled=False", f"{CUSTOM}.{key}={{'enabled': False}}: ", f"Did you mean {KEY_PREFIX}?")
            for key in ("snyc", "Sync", "syn", "syncs")
        ],
        (f"+{LORA}.rnk=8", f"{LORA}.rnk=8: unknown key", f"Did you mean {LORA}.rank?"),
        (f"+{LORA}.pefft.use_dora=True", f"{LORA}.pefft={{'use_dora': True}}: unknown key", f"Did you mean {PEFT}?"),
        (f"+{LORA}.use_rslora=True", f"{LORA}.use_rslora=True: nothing reads it there", f"Use {PEFT}.use_rslora."),
        (f"+{LORA}.r=8", f"{LORA}.r=8: nothing reads it there", f"Use {LORA}.rank."),
        *[
            (f"+{key}.enabled=False", f"{key}.enabled=False: nothing reads it there", f"Use {KEY_PREFIX}.enabled.")
            for key in ("rollout.sync", "sync", "custom.sync", "actor_rollout_ref.rollout.sync")
        ],
    ],
)
def test_it_ends_in_the_driver(tmp_path: Path, override: str, shown: str, remedy: str) -> None:
    text = refused(tmp_path, *(each for each in ADAPTED if not override.startswith(each[:-1])), override)
    assert shown in text
    assert remedy in text.partition(shown)[2], text


@pytest.mark.parametrize(
    "override",
    [
        f"+{PEFT}.init_lora_weights=pissa_niter_4",
        f"+{PEFT}.init_lora_weights=False",
        f"+{PEFT}.bias=lora_only",
        f"+{PEFT}.rank_pattern={{q_proj: 2}}",
        f"+{PEFT}.alpha_pattern={{q_proj: 2.5}}",
        f"{LORA}.dropout=0",
        f"{MODEL}.target_modules='.*(q|v)_proj'",
        f"{MODEL}.lora_adapter_path=somebody/adapter",  # on a hub
        f"{MODEL}.lora_adapter_path=/on/another/machine",
        f"+{CUSTOM}.async.enabled=True",
        f"+{CUSTOM}.syntax=1",
        "+rollout.sync.every=5",  # somebody else's
        f"+{LORA}.fully_sharded_loras=True",  # verl reads it for vLLM
    ],
)
def test_what_is_right_or_somebody_elses_passes(tmp_path: Path, override: str) -> None:
    assert rollout_of(tmp_path, *ADAPTED, override).custom.sync.enabled is True


def test_an_adapters_folder_without_its_config(tmp_path: Path) -> None:
    folder: Any = tmp_path / "adapter"
    folder.mkdir()
    path = f"{MODEL}.lora_adapter_path={folder}"
    assert "it holds no adapter_config.json" in refused(tmp_path, *ADAPTED, path)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["q_proj"], "r": 8}')
    assert hydra_run.run(tmp_path, "actor_rollout_ref.rollout.name=sglang", *ADAPTED, path)
