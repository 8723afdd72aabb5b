# SPDX-License-Identifier: Apache-2.0
"""What SGLang unpickles may come from a process in which megatron-core has replaced a function of torch's."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from sglang.srt.utils.common import SafeUnpickler

from verl_sync_plugin.rollouts.sglang.request import dumps


def replaced(content: bytes) -> Any:
    """Stands in torch's place, as ``megatron.core.safe_globals.safe_load_from_bytes`` does."""
    return torch.load(io.BytesIO(content), weights_only=True)


@pytest.mark.parametrize("foreign", [False, True])
def test_sglang_unpickles_tensors_by_value(foreign: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if foreign:
        monkeypatch.setattr(torch.storage, "_load_from_bytes", replaced)
    held = torch.storage._load_from_bytes
    packed = dumps([("name", torch.arange(6, dtype=torch.bfloat16).view(2, 3)), ("empty", torch.empty(0))])
    assert torch.storage._load_from_bytes is held
    assert b"test_pickling" not in packed
    (name, tensor), (_, empty) = SafeUnpickler(io.BytesIO(packed)).load()
    assert name == "name" and tensor.dtype == torch.bfloat16 and tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert empty.numel() == 0
