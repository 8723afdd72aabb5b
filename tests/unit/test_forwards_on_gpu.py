# SPDX-License-Identifier: Apache-2.0
"""An engine that is paused with requests inside may still compute a forward pass, on a stream of its own."""

from __future__ import annotations

import pytest
import torch

from verl_sync_plugin.rollouts.sglang.loader import wait_for_forwards

pytestmark = pytest.mark.gpu

CYCLES = 1_000_000_000  # a good half second of a GPU


def test_weights_are_written_only_when_a_forward_pass_on_another_stream_has_read_them() -> None:
    model = torch.nn.Linear(512, 512, device="cuda")
    before, read, forwards = model.weight.detach().clone(), torch.empty_like(model.weight), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(forwards), torch.no_grad():
        torch.cuda._sleep(CYCLES)
        read.copy_(model.weight)
    assert not forwards.query(), "it still runs"
    wait_for_forwards(model)
    model.weight.data.zero_()
    torch.cuda.synchronize()
    assert torch.equal(read, before)
