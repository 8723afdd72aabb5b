# SPDX-License-Identifier: Apache-2.0
"""What an engine's model keeps on another device than its copies are made on is written by the model itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from verl_sync_plugin.receiver.copy_plan import make_plan
from verl_sync_plugin.receiver.recorder import Source
from verl_sync_plugin.rollouts.sglang.model import SGLangModel

SHAPE = (8, 64)
NAMES = ("one.weight", "two.q_a_proj.weight", "two.kv_a_proj_with_mqa.weight")


class Model(torch.nn.Module):
    """Copies what it is given into parameters of these names, and writes one constant."""

    def __init__(self) -> None:
        super().__init__()
        self.held = torch.nn.ParameterList(torch.empty(SHAPE) for _ in NAMES)
        self.padding = torch.nn.Parameter(torch.empty(SHAPE))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.held[NAMES.index(name)].data.copy_(tensor)
        self.padding.data.zero_()


def test_an_address_on_another_device_is_in_no_plan() -> None:
    sources = [Source(name, torch.float32, SHAPE, None) for name in NAMES]
    here = make_plan(SGLangModel(Model(), 0), sources, torch.device("cpu"))
    assert set(here.planned) == set(NAMES) and not here.refused
    # As an engine whose slots are on a GPU sees a parameter in host memory; no GPU is needed to make a plan
    there = make_plan(SGLangModel(Model(), 0), sources, torch.device("cuda", 0))
    assert not there.planned
    assert there.refused == dict.fromkeys(NAMES, "is kept on cpu, not on cuda:0")
    assert [value for _, value in there.fills] == [0.0], "torch writes constants, wherever they are"
