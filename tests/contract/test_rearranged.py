# SPDX-License-Identifier: Apache-2.0
"""An engine that rearranges weights once they are loaded from a checkpoint is refused by name, not served wrongly."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from one_process import OneProcess
from worlds import run_world

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.errors import SyncError


class InOrder:
    """A stand-in for SGLang's quantization method of a module: what it does after a load of a checkpoint."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.c.data = layer.c.data.view(30, 30)  # the same bytes where they were, as many methods do


class Reordered:
    """As the Mixture-of-Experts backends of Blackwell and AMD."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.c.copy_(layer.c.flip(0))


class Moved:
    """Into memory of its own, in the same order."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.c.data = layer.c.data.clone()


def syncs(checkpoint: str, folder: str, method: Any, verify: str) -> list[str]:
    """What each of two syncs says of an engine whose module has this method."""
    os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1", CUDA_VISIBLE_DEVICES="")
    place, said = OneProcess(checkpoint, Path(folder), verify=verify), []
    place.model.quant_method = method()
    for _ in range(2):
        try:
            place.sync()
            assert place.model.holds(place.source.weights)
            said.append("")
        except SyncError as error:
            said.append(str(error))
    place.close()
    return said


@pytest.mark.parametrize("verify", ["first", "never"])
@pytest.mark.parametrize(
    ("method", "changed"), [(InOrder, ""), (Reordered, "SGLang changes c once"), (Moved, "the places of parameters")]
)
def test_weights_that_are_rearranged_behind_every_load(
    method: Any, changed: str, verify: str, tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    (said,) = run_world(1, syncs, tiny_model("qwen2"), str(tmp_path), method, verify)
    for text in said:
        assert (changed in text and "moe_runner_backend=triton" in text and TURN_OFF in text) if changed else not text
