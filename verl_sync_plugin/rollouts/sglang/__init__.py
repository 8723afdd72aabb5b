# SPDX-License-Identifier: Apache-2.0
"""SGLang as a ``rollouts.Rollout``, and its arguments for a script's engine (``spmd.py``).

Before anything runs, in every process:
    refusals       keys, arguments, models and adapters with which SGLang cannot be synced
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
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl_sync_plugin.rollouts import LocalLaunch, LocalSpec
from verl_sync_plugin.rollouts.sglang.refusals import (  # noqa: F401  (some are what ``Rollout`` lists)
    DTYPES,
    REFUSED,
    RETAIN_COPY,
    UNSERVED,
    Rows,
    engine_arguments,
    keeps_copy,
    left_to_verl,
    only,
    reason_against,
    refuse_adapter,
    refuse_arguments,
    refuse_checkpoint,
    refuse_experts,
    refuse_family,
    refuse_keys,
    refuse_quantization,
)

if TYPE_CHECKING:
    import torch

    from verl_sync_plugin.rollouts import Rollout
    from verl_sync_plugin.rollouts import sglang as this
ENGINE = "SGLang"
ADAPTER = "verl_sync_plugin.rollouts.sglang.adapter.SyncServerAdapter"
STOCK_ADAPTER = "verl.workers.rollout.sglang_rollout.sglang_rollout.ServerAdapter"
STOCK_LOADER = "_load_sglang"
LOADER_MODULE = "verl_sync_plugin.rollouts.sglang.loader"
DIGEST_LOADER = f"{LOADER_MODULE}.write_digests"

ON_GPU: Mapping[str, Any] = {
    "enable_memory_saver": True,
    # As verl: the capture of CUDA graphs with fa3 is broken in SGLang 0.5.12 (sglang #22800)
    "attention_backend": "flashinfer",
}
ON_CPU: Mapping[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 8192,
    "sleep_on_idle": True,  # a scheduler without work would keep a core busy
}
# What a script may not give of SGLang's arguments: what ``SpmdRollout`` sets itself, and what no sync serves there
NOT_HERE: Rows = {
    "model_path": (only(None), "leave it out, and set model"),
    "tp_size": (only(None), "leave it out, and set tensor_parallel_size"),
    "dtype": (only(None), "leave it out, and set dtype"),
    "mem_fraction_static": (only(None), "leave it out, and set gpu_memory_utilization"),
    "load_format": (only(None), "leave it out, and set random_weights"),
    "enable_weights_cpu_backup": (only(None, True), "leave it out: the copy is kept for models that need it"),
    "skip_tokenizer_init": (only(None), "leave it out: prompts and responses are token ids"),
    "dp_size": (only(None, 1), UNSERVED),
    "nnodes": (only(None, 1), UNSERVED),
    "speculative_algorithm": (only(None), UNSERVED),
}


def load_replica() -> type:
    if importlib.util.find_spec("sglang") is None:
        raise ValueError(
            f"actor_rollout_ref.rollout.name='sglang': SGLang is not installed in {sys.executable}. Install it there "
            "(the plugin's extra 'sglang' has the version), or set actor_rollout_ref.rollout.name to an engine that is."
        ) from ModuleNotFoundError("No module named 'sglang'", name="sglang")
    from verl.workers.rollout.replica import _load_sglang

    _load_sglang()  # verl's preparation of SGLang's imports comes first
    from verl_sync_plugin.rollouts.sglang.server import SyncSGLangReplica

    return SyncSGLangReplica


def pack_adapter(settings: Mapping[str, Any], factors: dict[str, torch.Tensor]) -> tuple[tuple[Any, ...], int]:
    from verl_sync_plugin.rollouts.sglang.lora import served_settings, summary
    from verl_sync_plugin.rollouts.sglang.request import dumps

    refuse_experts(factors)
    packed = dumps(factors)  # by value: a shared handle would be opened by every rank, and counted once
    return (served_settings(settings, factors), packed, summary(factors)), len(packed)


def prepare_local(spec: LocalSpec) -> LocalLaunch:
    if not spec.cuda and os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        raise ValueError("this process has no GPU: to run SGLang on a CPU, set VERL_PLATFORM=cpu for torchrun.")
    if spec.dtype not in DTYPES:
        raise ValueError(f"dtype={spec.dtype!r}: not a dtype of SGLang's weights. Use one of {', '.join(DTYPES)}.")
    architectures = list(spec.config.get("architectures") or [])
    for architecture in architectures:
        if why := reason_against(architecture, spec.config):
            raise ValueError(f"model={spec.model}: {architecture} {why}. Use another model.")
    for rows in (NOT_HERE, REFUSED):
        refuse_arguments(spec.arguments.get, "engine", "leave it out", rows=rows)
    # On a CPU nothing is ever released, and copied even less
    copied = spec.cuda and keeps_copy(architectures, spec.arguments)
    variable = {"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}  # verl runs with older ones too
    if copied:
        variable[RETAIN_COPY] = "1"
    if not spec.cuda:  # SGLang wants to know which cores each of its ranks has
        variable = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(spec.tensor_parallel_size)))}
    loaders = spec.arguments.get("custom_weight_loader") or []
    arguments = {
        "log_level": "error",
        "skip_server_warmup": True,
        **(ON_GPU if spec.cuda else ON_CPU),
        **spec.arguments,
        "model_path": spec.model,
        "tp_size": spec.tensor_parallel_size,
        "dtype": spec.dtype,
        "mem_fraction_static": spec.gpu_memory_utilization,
        "load_format": "dummy" if spec.random_weights else "auto",
        "enable_weights_cpu_backup": copied,
        "skip_tokenizer_init": True,
        "custom_weight_loader": [*loaders, f"{LOADER_MODULE}.load", DIGEST_LOADER],
    }
    given = arguments, spec.sync.timeout_seconds, spec.random_weights
    return LocalLaunch(ENGINE, f"{__name__}.script_server", given, variable)


if TYPE_CHECKING:
    _: Rollout = this
