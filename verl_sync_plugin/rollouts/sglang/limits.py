# SPDX-License-Identifier: Apache-2.0
"""What SGLang estimates that it needs of a device: read from the arguments that the user hands to it."""

from __future__ import annotations

from typing import Any

from verl_sync_plugin.memory import Estimate

# What generating takes beside the static memory, per token of a prefill chunk, and on top
# (``ServerArgs._handle_gpu_memory_settings`` of SGLang 0.5.12, as for the defaults below)
CHUNK_TOKEN_BYTES, BESIDE_CHUNK_BYTES = 1536 * 1024, 1 << 30
# The default size of a chunk in tokens, by the device's memory in GiB that it is below
DEFAULT_CHUNKS, LARGEST_CHUNK = ((35, 2048), (60, 4096), (160, 8192)), 16384


def sglang_arguments(config: Any) -> Any:
    """What the user hands to SGLang beside verl's own keys.

    Args:
        config: verl's rollout config.
    """
    return (config.engine_kwargs or {}).get("sglang", None) or {}


def generating_bytes(config: Any) -> Estimate:
    """What SGLang estimates that generating takes.

    Args:
        config: verl's rollout config.
    """
    chunk = sglang_arguments(config).get("chunked_prefill_size", None)
    return lambda total: chunk_bytes(total, chunk)


def chunk_bytes(total: int, chunk: int | None) -> int:
    """What SGLang estimates for a prefill of one chunk, in bytes.

    Args:
        total: bytes of the device.
        chunk: ``chunked_prefill_size`` in tokens; ``None`` for the default, not positive for none.
    """
    if chunk is None:
        chunk = next((tokens for below, tokens in DEFAULT_CHUNKS if total < below << 30), LARGEST_CHUNK)
    return (chunk if chunk > 0 else LARGEST_CHUNK) * CHUNK_TOKEN_BYTES + BESIDE_CHUNK_BYTES
