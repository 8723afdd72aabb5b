# SPDX-License-Identifier: Apache-2.0
"""The request that goes from the rollout server through SGLang to the loader in its scheduler processes.

Whoever can reach SGLang's HTTP port can ask for a weight update, and name our loader. It follows only who knows the
token that the processes of its engine were started with.
"""

from __future__ import annotations

import io
import os
import pickle
import secrets
from typing import Any

import torch

# SGLang's ``load_format`` of a sync; the same for an engine whose requests were retracted; of a look at an adapter
LOADER = "verl_sync_plugin.rollouts.sglang.loader.load"
FORGETTING_LOADER = "verl_sync_plugin.rollouts.sglang.loader.load_and_forget_prefixes"
ADAPTER_CHECK = "verl_sync_plugin.rollouts.sglang.lora.check"
TOKEN_VARIABLE = "VERL_SYNC_ENGINE_TOKEN"
_STORAGE = "_load_from_bytes"  # what a pickled storage names as its constructor


def new_token() -> str:
    """A random token for one engine, of 32 hexadecimal digits."""
    return secrets.token_hex(16)


def hand_down(token: str) -> None:
    """Has the SGLang that this process launches inherit the token; one engine on several hosts needs the same one."""
    os.environ[TOKEN_VARIABLE] = token


def pack_request(request: tuple[Any, ...]) -> bytes:
    """A request (``LoadRequest.to_wire()``, for example) and the token as SGLang's serialized named tensors: one pair
    of these and an empty tensor. From the process that launched SGLang. The request is in the slot of a name, and
    passes SGLang's ``SafeUnpickler`` because it consists of builtins. Plain pickle on purpose: SGLang's serializer
    would leave a segment of shared memory over for a tensor without bytes."""
    return dumps([((*request, os.environ[TOKEN_VARIABLE]), torch.empty(0))])


def dumps(value: object) -> bytes:
    """Pickles builtins and tensors on the CPU. megatron-core 0.18 replaces a function of torch's in every process that
    imports it, whose pickles name the replacement, which SGLang refuses. Here they name torch's."""
    held: Any = vars(torch.storage)[_STORAGE]
    setattr(torch.storage, _STORAGE, held if held.__module__ == torch.storage.__name__ else _load_from_bytes)
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    finally:
        setattr(torch.storage, _STORAGE, held)


def _load_from_bytes(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


_load_from_bytes.__module__ = torch.storage.__name__  # a pickle names a function by its module and its name
