# SPDX-License-Identifier: Apache-2.0
"""The loader SGLang calls for a weight update whose ``load_format`` is this function's name.

Hazard: SGLang 0.5.12 treats an exception of a custom loader as fatal and kills the scheduler together with its parent,
and it ignores the return value. So everything is caught here, and what went wrong travels to the trainer through the
control channel.
"""

from __future__ import annotations

import time
import traceback
from contextlib import suppress
from typing import Any

import torch

from verl_sync_plugin.log import say
from verl_sync_plugin.memory import no_collection
from verl_sync_plugin.receiver.session import ReceiverSession
from verl_sync_plugin.rollouts.sglang.complaints import complain
from verl_sync_plugin.rollouts.sglang.model import SGLangModel
from verl_sync_plugin.rollouts.sglang.prefixes import forget_images, forget_prefixes, wait_for_forwards
from verl_sync_plugin.rollouts.sglang.request import admitted, sync_id_in
from verl_sync_plugin.transport.channel import Channel, ChannelClosedError, ChannelTimeoutError
from verl_sync_plugin.transport.codec import BadMessageError
from verl_sync_plugin.transport.listener import connect
from verl_sync_plugin.transport.protocol import Failed, Join, LoadRequest

CONNECT_TIMEOUT_SECONDS = 10.0

_sessions: dict[int, ReceiverSession] = {}


def load(model: torch.nn.Module, named_tensors: list[tuple[Any, torch.Tensor]]) -> None:
    """Receives one whole sync into ``model``.

    Args:
        model: this tensor-parallel rank's SGLang model.
        named_tensors: one pair; its name is a ``LoadRequest`` as ``pack_request`` made it, its tensor is empty.
    """
    _load(model, named_tensors, forget=False)


def load_and_forget_prefixes(model: torch.nn.Module, named_tensors: list[tuple[Any, torch.Tensor]]) -> None:
    """``load`` for an engine whose requests were retracted; see ``prefixes.forget_prefixes``."""
    _load(model, named_tensors, forget=True)


def _load(model: torch.nn.Module, named_tensors: list[tuple[Any, torch.Tensor]], forget: bool) -> None:
    try:
        header = admitted(named_tensors[0][0])
    except Exception as error:  # of whoever can reach SGLang's port; no trainer is told of it
        say(f"a weight update was refused: {error}")
        return
    try:
        request = LoadRequest.from_wire(header)
        address = request.addresses[tensor_parallel_rank()]
        channel = connect(address, CONNECT_TIMEOUT_SECONDS, request.timeout_seconds)
        channel.send(Join(request.sync_id))
    except Exception as error:
        why = f"engine rank {tensor_parallel_rank()} could not reach its trainer rank: {type(error).__name__}: {error}"
        complain(sync_id_in(header), f"{why}\n{traceback.format_exc(limit=-6)}")
        return
    try:
        _receive(model, channel, request, forget)
    finally:
        channel.close()


def _receive(model: torch.nn.Module, channel: Channel, request: LoadRequest, forget: bool) -> None:
    try:
        wait_for_forwards(model)
        forget_images()
        if forget:
            forget_prefixes()
        session = _sessions.get(id(model))
        if session is None:
            known = SGLangModel(model, tensor_parallel_rank())
            session = _sessions[id(model)] = ReceiverSession(known)
            say(f"loader active, rank {known.tp_rank} of {known.name}")
        with no_collection():
            session.run(channel, request)
    except ChannelClosedError:
        say(f"sync {request.sync_id} ended by the trainer before its commit")
    except Exception as error:
        say(f"sync {request.sync_id} failed in the engine\n{traceback.format_exc()}")
        _tell(channel, f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}", request.timeout_seconds)


def _tell(channel: Channel, text: str, timeout: float) -> None:
    """Reports a failure and waits for the trainer to hang up: closed at once, its next word would break the pipe
    before it has read ours."""
    with suppress(ChannelClosedError, ChannelTimeoutError, BadMessageError):
        channel.send(Failed(text))
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            channel.receive(left)


def tensor_parallel_rank() -> int:
    """This scheduler's rank among those of its engine."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)
