# SPDX-License-Identifier: Apache-2.0
"""SGLang behind seam 2 (``rollouts.Rollout``).

Before anything runs, in every process:
    refusals       keys, arguments, models and adapters with which SGLang cannot be synced
    launch         SGLang's arguments for a script's engine (``spmd/``)
In the task runner and the rollout server's process:
    server         verl's HTTP server and replica: wakes, loads, flushes, pauses and answers for the whole engine
    updates        sleep, wake, load and flush, for that server as for a script's
    script_server  the process of a script's engine
    request        what the server sends through SGLang to the loader, and its token
In every actor worker:
    adapter        verl's SGLang adapter with the plugin's phase (``rollouts/adapter``)
In SGLang's scheduler processes:
    loader         what SGLang calls for a load: follows the request, runs the receiver's session
    model          SGLang's model as the receiver's ``EngineModel``
    lora           adapters that SGLang serves itself: packed, and seen to be computed with
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl_sync_plugin.rollouts.sglang.launch import prepare_local
from verl_sync_plugin.rollouts.sglang.refusals import (
    engine_arguments,
    left_to_verl,
    refuse_adapter,
    refuse_checkpoint,
    refuse_experts,
    refuse_family,
    refuse_keys,
    refuse_stock,
    refuse_untied,
)

if TYPE_CHECKING:
    import torch

    from verl_sync_plugin.memory import Estimate
    from verl_sync_plugin.rollouts import Rollout
    from verl_sync_plugin.rollouts import sglang as this

__all__ = [
    "ADAPTER",
    "DIGEST_LOADER",
    "ENGINE",
    "LOADER",
    "NAME",
    "STOCK_ADAPTER",
    "STOCK_LOADER",
    "generating_bytes",
    "left_to_verl",
    "load_replica",
    "pack_adapter",
    "prepare_local",
    "refuse_adapter",
    "refuse_checkpoint",
    "refuse_family",
    "refuse_keys",
    "refuse_stock",
    "refuse_untied",
]

NAME, ENGINE = "sglang", "SGLang"
ADAPTER = "verl_sync_plugin.rollouts.sglang.adapter.SyncServerAdapter"
STOCK_ADAPTER = "verl.workers.rollout.sglang_rollout.sglang_rollout.ServerAdapter"
STOCK_LOADER = "_load_sglang"
LOADER = "verl_sync_plugin.rollouts.sglang.loader"
DIGEST_LOADER = f"{LOADER}.write_digests"

# What generating takes on top of the static memory, per token of a prefill chunk, and besides
# (``ServerArgs._handle_gpu_memory_settings`` of SGLang 0.5.12, as for the defaults below)
CHUNK_TOKEN_BYTES, OTHER_BYTES = 1536 * 1024, 1 << 30
# The default size of a chunk in tokens, by the device's memory in GiB that it is below
DEFAULT_CHUNKS, LARGEST_CHUNK = ((35, 2048), (60, 4096), (160, 8192)), 16384


def load_replica() -> type:
    """The loader for verl's replica registry key ``sglang``.

    Raises:
        ValueError: SGLang is not installed in this process's Python.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ValueError(
            f"actor_rollout_ref.rollout.name='sglang': SGLang is not installed in {sys.executable}. Install it there "
            "(the plugin's extra 'sglang' has the version), or set actor_rollout_ref.rollout.name to an engine that is."
        )
    from verl.workers.rollout.replica import _load_sglang

    _load_sglang()  # verl's preparation of SGLang's imports comes first
    from verl_sync_plugin.rollouts.sglang.server import SyncSGLangReplica

    return SyncSGLangReplica


def pack_adapter(settings: Mapping[str, Any], factors: dict[str, torch.Tensor]) -> tuple[tuple[Any, ...], int]:
    """Arguments of the server's ``load_adapter``, and how many bytes travel.

    Raises:
        ValueError: the adapter has factors of experts.
    """
    from verl_sync_plugin.rollouts.sglang.lora import served_settings, summary
    from verl_sync_plugin.rollouts.sglang.request import dumps

    refuse_experts(factors)
    packed = dumps(factors)  # by value: a shared handle would be opened by every rank, and counted once
    return (served_settings(settings, factors), packed, summary(factors)), len(packed)


def generating_bytes(config: Any) -> Estimate:
    """SGLang's own estimate for a prefill of one chunk."""
    given = engine_arguments(config).get("chunked_prefill_size", None)

    def estimate(total: int) -> int:
        chunk = given
        if chunk is None:
            chunk = next((tokens for below, tokens in DEFAULT_CHUNKS if total < below << 30), LARGEST_CHUNK)
        return (chunk if chunk > 0 else LARGEST_CHUNK) * CHUNK_TOKEN_BYTES + OTHER_BYTES

    return estimate


if TYPE_CHECKING:
    _: Rollout = this
