# SPDX-License-Identifier: Apache-2.0
"""The functions that SGLang calls in each of its scheduler processes for a load of weights.

Hazard: SGLang 0.5.12 treats an exception of a custom loader as fatal and kills the scheduler together with its parent,
and it ignores the return value. So everything is caught here, and what went wrong travels to the trainer over the
socket, or stays in SGLang's log where the trainer cannot be reached.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sys
import time
import traceback
from contextlib import closing, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from verl_sync_plugin.engine.session import ReceiverSession
from verl_sync_plugin.log import say
from verl_sync_plugin.rollouts.sglang.model import SGLangModel, write_constants
from verl_sync_plugin.rollouts.sglang.request import TOKEN_VARIABLE
from verl_sync_plugin.room import no_collection
from verl_sync_plugin.transport.channel import (
    BadMessageError,
    Channel,
    ChannelClosedError,
    ChannelTimeoutError,
    connect,
)
from verl_sync_plugin.transport.protocol import Failed, LoadRequest

NamedTensors = list[tuple[Any, torch.Tensor]]  # one pair: a request as ``pack_request`` made it, and an empty tensor

_sessions: dict[int, ReceiverSession] = {}


def load_and_forget_prefixes(model: torch.nn.Module, named_tensors: NamedTensors) -> None:
    """``load`` for an engine whose requests were retracted; see ``forget_prefixes``."""
    load(model, named_tensors, forget=True)


def load(model: torch.nn.Module, named_tensors: NamedTensors, forget: bool = False) -> None:
    """Receives one whole sync into ``model``; the request is a ``LoadRequest``."""
    try:
        header = admitted(named_tensors[0][0])
    except Exception as error:  # of whoever can reach SGLang's port; no trainer hears of it
        say(f"a weight update was refused: {error}")
        return
    try:
        write_constants(model)  # whatever comes of the sync: SGLang >= 0.5.21 reads them after every load
        request = LoadRequest.from_wire(header)
        channel = connect(request.addresses[tensor_parallel_rank()], request.timeout_seconds)
    except Exception:
        say(f"engine rank {tensor_parallel_rank()} could not reach its trainer rank\n{traceback.format_exc()}")
        return
    with closing(channel):
        _receive(model, channel, request, forget)


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
        with suppress(ChannelClosedError, ChannelTimeoutError, BadMessageError):
            channel.send(Failed(f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"))
            # Until the trainer hangs up: closed at once, its next word would break the pipe before it has read ours
            deadline = time.monotonic() + request.timeout_seconds
            while (left := deadline - time.monotonic()) > 0:
                channel.receive(left)


def admitted(header: Any) -> tuple[Any, ...]:
    """Unpacks in a process of the engine what ``pack_request`` was given. Raises PermissionError where it was not
    packed by who launched this engine."""
    own, given = os.environ.get(TOKEN_VARIABLE, ""), header[-1] if isinstance(header, tuple) and header else None
    if not own or not isinstance(given, str) or not hmac.compare_digest(own.encode(), given.encode()):
        raise PermissionError("the request does not come from the server that launched this engine")
    return header[:-1]


def tensor_parallel_rank() -> int:
    from sglang.srt.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)


def wait_for_forwards(model: torch.nn.Module) -> None:
    """Waits until no forward pass reads the weights any more: paused ``in_place`` with its overlapping schedule, SGLang
    leaves the last one running on a stream of its own."""
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.is_cuda:
        torch.cuda.synchronize(parameter.device)


def forget_images() -> None:
    """Has SGLang forget what its vision tower made of images. It keeps that by image, and its ``flush_cache`` leaves it
    there (sglang #36468): an image that was seen before would be answered with the earlier tower."""
    for name in ("mm_utils", "mm_schedule"):  # up to SGLang 0.5.17, and since
        cache = getattr(sys.modules.get(f"sglang.srt.managers.{name}"), "embedding_cache", None)
        if cache is not None:
            cache.clear()


def forget_prefixes() -> None:
    """Has the scheduler that is loading weights flush its prefix cache although requests wait. SGLang's ``retract``
    leaves a request's prompt in the prefix cache, and ``flush_cache`` refuses while any request waits, as all retracted
    ones do (sglang #33783). They hold nothing of the cache, so it is flushed with the queue out of sight."""
    scheduler = loading_scheduler()
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
    try:
        flushed = scheduler.flush_cache()
    finally:
        scheduler.waiting_queue = waiting
    if not flushed:
        raise RuntimeError("SGLang could not flush its prefix cache after retracting its requests: some still run")


def loading_scheduler() -> Any:
    """SGLang hands a loader nothing but the model; the scheduler is among its callers."""
    from sglang.srt.managers.scheduler import Scheduler

    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), Scheduler):
            return owner
        frame = frame.f_back
    raise RuntimeError("no scheduler of SGLang's is loading weights here")


def answer(folder: str, value: Any) -> None:
    """Answers a question of the server on the same host (``WeightUpdates.ask_ranks``)."""
    Path(folder, str(tensor_parallel_rank())).write_text(json.dumps(value), encoding="utf-8")


def write_digests(model: torch.nn.Module, named_tensors: NamedTensors) -> None:
    """A loader that loads nothing, for ``verl-sync prove``, whose engine alone lists it."""
    try:
        (folder,) = admitted(named_tensors[0][0])
        answer(folder, digests_of(model))
    except Exception as error:
        say(f"the digests of the parameters were not written: {error!r}")


def digests_of(model: torch.nn.Module) -> dict[str, str]:
    """A digest of each parameter and persistent buffer of a model, tied ones once under their first name. Shares
    nothing with the code that moves weights: the standard library hashes the bytes that torch hands over."""
    persistent = set(model.state_dict(keep_vars=True))
    digests = {}
    for name, tensor in (*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in persistent)):
        if tensor.numel():
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
            digests[name] = hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()
    return digests
