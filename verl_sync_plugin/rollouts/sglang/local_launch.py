# SPDX-License-Identifier: Apache-2.0
"""How the engine of a script is launched: SGLang's arguments, and what is refused of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from verl_sync_plugin.rollouts.base import LocalSpec
from verl_sync_plugin.rollouts.sglang.arguments import DTYPES, refuse_arguments
from verl_sync_plugin.rollouts.sglang.backup import covered
from verl_sync_plugin.rollouts.sglang.families import reason_against
from verl_sync_plugin.rollouts.sglang.local import NEVER_SYNCED, LocalEngine
from verl_sync_plugin.rollouts.sglang.local_endpoint import LocalEndpoint
from verl_sync_plugin.rollouts.sglang.request import LOADER

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
MORE_RANKS: Mapping[str, tuple[Any, ...]] = {"dp_size": (None, 1), "nnodes": (None, 1)}


class SGLangLaunch:
    """See ``rollouts/base.LocalLaunch``.

    Raises:
        ValueError: SGLang cannot serve this; names argument, value and remedy.
    """

    def __init__(self, spec: LocalSpec) -> None:
        refuse(spec)
        self._spec = spec
        self._keeps_copy = spec.cuda and not covered(
            list(spec.config.get("architectures") or [])
        )  # on a CPU nothing is ever released, and copied even less

    @property
    def arguments(self) -> dict[str, Any]:
        """SGLang's."""
        spec = self._spec
        given: dict[str, Any] = dict(ON_GPU if spec.cuda else ON_CPU)
        if spec.cuda:
            given["enable_weights_cpu_backup"] = self._keeps_copy
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
            "custom_weight_loader": [*loaders, LOADER],
        }

    def start(self, devices: Sequence[str]) -> LocalEngine:
        """See ``rollouts/base.LocalLaunch``."""
        spec = self._spec
        unready = NEVER_SYNCED if spec.random_weights else ""
        return LocalEngine(self.arguments, devices, spec.sync.timeout_seconds, unready, self._keeps_copy)

    def endpoint(self, engine: LocalEngine | None, ranks: tuple[int, ...]) -> LocalEndpoint:
        """See ``rollouts/base.LocalLaunch``."""
        restores = self._keeps_copy and not self._spec.random_weights
        return LocalEndpoint(engine, ranks, restores, self._spec.sync.timeout_seconds)


def refuse(spec: LocalSpec) -> None:
    """Raises ValueError for what SGLang cannot do of this; names argument, value and remedy."""
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
        harmless = {**MORE_RANKS, "speculative_algorithm": (None,)}.get(key)
        if harmless is not None and value not in harmless:
            raise ValueError(f"engine.{key}={value!r}: weight sync cannot serve it. Leave it out.")
    refuse_arguments(spec.arguments.get, "engine", "leave it out")
