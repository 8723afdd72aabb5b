# SPDX-License-Identifier: Apache-2.0
"""The one payload that goes through SGLang's ``update_weights_from_tensor``, and the token by which it is known.

Whoever can reach SGLang's HTTP port can ask for a weight update, and name our loader. It follows only who knows the
token that the processes of its engine were started with.
"""

from __future__ import annotations

import hmac
import os
import secrets
from typing import Any

import torch

from verl_sync_plugin.rollouts.sglang.complaints import listen
from verl_sync_plugin.rollouts.sglang.pickling import dumps

# What SGLang is told to load a request with: its ``load_format``
LOADER = "verl_sync_plugin.rollouts.sglang.loader.load"
# The same for an engine whose requests were retracted
FORGETTING_LOADER = "verl_sync_plugin.rollouts.sglang.loader.load_and_forget_prefixes"
# And what it is told to look with, at an adapter that it serves
ADAPTER_CHECK = "verl_sync_plugin.rollouts.sglang.held_adapter.check"
TOKEN_VARIABLE = "VERL_SYNC_ENGINE_TOKEN"


def new_token() -> str:
    """A random token for one engine, of 32 hexadecimal digits."""
    return secrets.token_hex(16)


def hand_down(token: str) -> None:
    """Before SGLang is launched from this process: its processes inherit the token, and where they can complain. Those
    of one engine on several hosts need the same token."""
    os.environ[TOKEN_VARIABLE] = token
    listen()


def pack_request(request: tuple[Any, ...]) -> bytes:
    """``LoadRequest.to_wire()`` and the token as SGLang's serialized named tensors: one pair of these and an empty
    tensor. From the process that launched SGLang.

    The request goes into the name slot of ``update_weights_from_tensor``, and passes SGLang's ``SafeUnpickler`` because
    it consists of builtins. Plain pickle on purpose: SGLang's serializer shares tensors through the multiprocessing
    machinery, which would leave a shared-memory segment behind for a tensor without bytes.
    """
    return dumps([((*request, os.environ[TOKEN_VARIABLE]), torch.empty(0))])


def admitted(header: Any) -> tuple[Any, ...]:
    """What was given to ``pack_request``; in a process of the engine.

    Raises:
        PermissionError: it was not packed by who launched this engine.
    """
    own, given = os.environ.get(TOKEN_VARIABLE, ""), header[-1] if isinstance(header, tuple) and header else None
    if not own or not isinstance(given, str) or not hmac.compare_digest(own.encode(), given.encode()):
        raise PermissionError("the request does not come from the server that launched this engine")
    return header[:-1]


def sync_id_in(header: tuple[Any, ...]) -> str:
    """The sync that an admitted request names, also one of another version of the protocol; empty if it names none."""
    return str(header[2]) if len(header) > 2 else ""
