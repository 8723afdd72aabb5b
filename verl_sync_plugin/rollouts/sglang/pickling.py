# SPDX-License-Identifier: Apache-2.0
"""Pickles with tensors by value, as SGLang's ``SafeUnpickler`` takes them from any process."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

_NAME = "_load_from_bytes"  # what a pickled storage names as its constructor


def dumps(value: object) -> bytes:
    """Pickles builtins and tensors on the CPU.

    megatron-core 0.18 puts a function of its own in the place of torch's, in every process that imports it, and the
    pickles of these processes name that one, which SGLang refuses. Here they name torch's, whatever is in its place;
    who unpickles uses what it has there.
    """
    held: Any = vars(torch.storage)[_NAME]
    setattr(torch.storage, _NAME, held if held.__module__ == torch.storage.__name__ else _load_from_bytes)
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    finally:
        setattr(torch.storage, _NAME, held)


def _load_from_bytes(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


_load_from_bytes.__module__ = torch.storage.__name__  # a pickle names a function by its module and its name
