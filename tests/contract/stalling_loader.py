# SPDX-License-Identifier: Apache-2.0
"""Custom loaders for tests that load nothing: one makes the engine slow, one has the next sync stand still with half
of its weights written. They run in the scheduler."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import torch

from verl_sync_plugin.copies.copier import Targets
from verl_sync_plugin.engine.load import ModelLoad

COPIES = 12  # that are made of a load in place before it stands still
STALL_SECONDS = 15.0  # at most
FORWARD_SECONDS = 0.004  # at least: a tiny model would have answered before a test can interrupt it


def slow_down(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """From now on every forward pass takes its time."""
    honest = model.forward

    @functools.wraps(honest)
    def forward(*args: Any, **kwargs: Any) -> Any:
        time.sleep(FORWARD_SECONDS)
        return honest(*args, **kwargs)

    model.forward = forward


def arm(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """The next sync stands still between its first two buckets, or among the copies of a load in place, and says in a
    file "stalled" how many parameters are written. It goes on once there is a file "go", or fails with what that holds.

    Both are in the folder that the only pair names.
    """
    folder = Path(named_tensors[0][0])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    honest, load_in_place, find = ModelLoad.load, ModelLoad.load_in_place, Targets.find
    found = 0

    def stall() -> None:
        ModelLoad.load, ModelLoad.load_in_place, Targets.find = honest, load_in_place, find  # type: ignore[method-assign]
        _stand_still(folder, model, before)

    def loading(load: ModelLoad, index: int, slots: Any) -> None:
        if index == 1:
            stall()
        honest(load, index, slots)

    def finding(targets: Targets, address: int) -> tuple[torch.Tensor, int]:
        nonlocal found
        found += 1
        if found > COPIES:
            stall()
        return find(targets, address)

    def loading_in_place(load: ModelLoad, *args: Any) -> None:
        Targets.find = finding  # type: ignore[method-assign]
        load_in_place(load, *args)

    ModelLoad.load, ModelLoad.load_in_place = loading, loading_in_place  # type: ignore[method-assign]


def _stand_still(folder: Path, model: torch.nn.Module, before: dict[str, torch.Tensor]) -> None:
    written = [not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters()]
    unseen = folder / "stalled.part"
    unseen.write_text(json.dumps({"written": sum(written), "left": len(written) - sum(written)}))
    unseen.rename(folder / "stalled")
    deadline = time.monotonic() + STALL_SECONDS
    while not (folder / "go").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody has let this load go on")
        time.sleep(0.005)
    if failure := (folder / "go").read_text():
        raise RuntimeError(failure)
