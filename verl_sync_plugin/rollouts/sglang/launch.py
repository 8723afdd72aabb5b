# SPDX-License-Identifier: Apache-2.0
"""SGLang's arguments for a script's engine, and those that are refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from verl_sync_plugin.rollouts import LocalLaunch, LocalSpec
from verl_sync_plugin.rollouts.sglang.refusals import DTYPES, covered, reason_against, refuse_arguments

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
# Arguments that ``SpmdRollout`` sets itself, with the name they have there
OURS = {
    "model_path": "model",
    "tp_size": "tensor_parallel_size",
    "dtype": "dtype",
    "mem_fraction_static": "gpu_memory_utilization",
    "load_format": "random_weights",
    "enable_weights_cpu_backup": "nothing: it follows from the model",
    "skip_tokenizer_init": "nothing: prompts and responses are token ids",
}
UNSERVED_HERE: Mapping[str, tuple[Any, ...]] = {
    "dp_size": (None, 1),
    "nnodes": (None, 1),
    "speculative_algorithm": (None,),
}


def prepare_local(spec: LocalSpec) -> LocalLaunch:
    """The launch of a script's engine.

    Raises:
        ValueError: SGLang cannot serve this; names argument, value and remedy.
    """
    _refuse(spec)
    # On a CPU nothing is ever released, and copied even less
    keeps_copy = spec.cuda and not covered(list(spec.config.get("architectures") or []))
    arguments = _arguments(spec, keeps_copy)
    if spec.cuda:
        variable = {"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}  # verl runs with older ones too
    else:  # SGLang wants to know which cores each of its ranks has
        variable = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(spec.tensor_parallel_size)))}
    return LocalLaunch(
        "SGLang",
        "verl_sync_plugin.rollouts.sglang.script_server",
        (arguments, spec.sync.timeout_seconds, spec.random_weights, keeps_copy),
        variable,
        keeps_copy and not spec.random_weights,
    )


def _arguments(spec: LocalSpec, keeps_copy: bool) -> dict[str, Any]:
    given: dict[str, Any] = dict(ON_GPU if spec.cuda else ON_CPU)
    if spec.cuda:
        given["enable_weights_cpu_backup"] = keeps_copy
    given.update(spec.arguments)
    loaders = list(given.get("custom_weight_loader") or [])
    return {
        "log_level": "error",
        "skip_server_warmup": True,
        **given,
        "model_path": spec.model,
        "tp_size": spec.tensor_parallel_size,
        "dtype": spec.dtype,
        "mem_fraction_static": spec.gpu_memory_utilization,
        "load_format": "dummy" if spec.random_weights else "auto",
        "skip_tokenizer_init": True,
        "custom_weight_loader": [*loaders, "verl_sync_plugin.rollouts.sglang.loader.load"],
    }


def _refuse(spec: LocalSpec) -> None:
    if not spec.cuda and os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        raise ValueError(
            "this process has no GPU: SGLang runs on a CPU with VERL_PLATFORM=cpu in the environment of torchrun."
        )
    if spec.dtype not in DTYPES:
        raise ValueError(f"dtype={spec.dtype!r}: not a dtype of SGLang's weights. Use one of {', '.join(DTYPES)}.")
    for architecture in spec.config.get("architectures") or ():
        if why := reason_against(architecture, spec.config):
            raise ValueError(f"model={spec.model}: {architecture} {why}. Use another model.")
    for key, value in spec.arguments.items():
        if key in OURS:
            raise ValueError(f"engine.{key}={value!r}: leave it out, and set {OURS[key]}.")
        if key in UNSERVED_HERE and value not in UNSERVED_HERE[key]:
            raise ValueError(f"engine.{key}={value!r}: weight sync cannot serve it. Leave it out.")
    refuse_arguments(spec.arguments.get, "engine", "leave it out")
