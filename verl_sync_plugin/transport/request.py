"""The one payload that goes through SGLang's ``update_weights_from_tensor``."""

from __future__ import annotations

import pickle
from typing import Any

import torch


def pack_request(header: tuple[Any, ...]) -> bytes:
    """``LoadRequest.to_wire()`` as SGLang's serialized named tensors: one pair of header and empty tensor.

    Plain pickle on purpose: SGLang's serializer shares tensors through the multiprocessing machinery, which would
    leave a shared-memory segment behind for a tensor without bytes.
    """
    return pickle.dumps([(header, torch.empty(0))])
