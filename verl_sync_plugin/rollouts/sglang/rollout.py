# SPDX-License-Identifier: Apache-2.0
"""SGLang as the plugin's hooks know it, without importing it."""

from __future__ import annotations

import importlib.util
import sys

from verl_sync_plugin.rollouts.base import LocalLaunch, LocalSpec, Rollout
from verl_sync_plugin.rollouts.sglang.arguments import left_to_verl, refuse_keys
from verl_sync_plugin.rollouts.sglang.families import refuse_checkpoint, refuse_stock, refuse_untied
from verl_sync_plugin.rollouts.sglang.served_lora import refuse_adapter


def load_replica() -> type:
    """The loader behind verl's replica registry key ``sglang``.

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
    from verl_sync_plugin.rollouts.sglang.replica import SyncSGLangReplica

    return SyncSGLangReplica


def prepare_local(spec: LocalSpec) -> LocalLaunch:
    """See ``local_launch.SGLangLaunch``."""
    from verl_sync_plugin.rollouts.sglang.local_launch import SGLangLaunch

    return SGLangLaunch(spec)


ROLLOUT = Rollout(
    name="sglang",
    engine="SGLang",
    adapter="verl_sync_plugin.rollouts.sglang.adapter.SyncServerAdapter",
    stock_adapter="verl.workers.rollout.sglang_rollout.sglang_rollout.ServerAdapter",
    load_replica=load_replica,
    stock_loader="_load_sglang",
    refuse_keys=refuse_keys,
    left_to_verl=left_to_verl,
    refuse_stock=refuse_stock,
    refuse_checkpoint=refuse_checkpoint,
    refuse_untied=refuse_untied,
    refuse_adapter=refuse_adapter,
    digest_loader="verl_sync_plugin.rollouts.sglang.digests.write",
    prepare_local=prepare_local,
)
