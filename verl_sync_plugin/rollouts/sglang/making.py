# SPDX-License-Identifier: Apache-2.0
"""Makes the sharding manager of one actor worker from verl's configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from verl_sync_plugin.config.settings import check_bucket_megabytes, sync_config_of
from verl_sync_plugin.log import say
from verl_sync_plugin.rollouts.sglang.backup import keep_cpu_backup
from verl_sync_plugin.rollouts.sglang.endpoint import ServerActorEndpoint
from verl_sync_plugin.rollouts.sglang.families import refuse_family
from verl_sync_plugin.sharding_manager import get_sharding_manager
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.sync.separate.handles import Incoming
from verl_sync_plugin.sync.separate.managers import SeparateRollout
from verl_sync_plugin.trainers.base import trainer_device
from verl_sync_plugin.trainers.shard_stream import ShardStream
from verl_sync_plugin.transport.ranks import TrainerWorld


def make_manager(
    stream: ShardStream, config: Any, model_config: Any, server: Any, mesh: DeviceMesh, awake: bool
) -> ShardingManager:
    """Makes this rank's sharding manager. Collective over all trainer ranks.

    Args:
        stream: of the training engine.
        config: verl's rollout config.
        model_config: verl's.
        server: handle of the rollout server actor.
        mesh: the ``infer_tp`` dimension of the rollout mesh.
        awake: see ``awake_behind_load``.

    Raises:
        ValueError: a key or the model does not fit; names it, its value and the remedy.
    """
    refuse_family(str(model_config.path), model_config.hf_config.to_dict())  # the driver may have had no checkpoint
    sync, device = sync_config_of(config), trainer_device()
    manager_class = get_sharding_manager(stream.trainer, str(config.name))
    megabytes = check_bucket_megabytes(
        config.get("update_weights_bucket_megabytes", None),
        config.checkpoint_engine.update_weights_bucket_megabytes,
    )
    backup = keep_cpu_backup(config, model_config)
    restores = backup and not str(config.load_format).startswith("dummy")
    place, ranks = mesh.get_local_rank(), tuple(mesh.mesh.tolist())
    endpoint = ServerActorEndpoint(
        server, place, ranks, restores, sync.timeout_seconds, awake, after_death=TrainerWorld.after_loss
    )
    say(
        f"actor rank {torch.distributed.get_rank()}: sharding manager {manager_class.__name__}, "
        f"buckets of {megabytes} MiB, engine's CPU backup {'on' if backup else 'off'}"
    )
    return manager_class(stream.engine, endpoint, sync, megabytes << 20, device, str(config.dtype))


def make_separate(incoming: Incoming, config: Any, model_config: Any, server: Any) -> SeparateRollout:
    """Makes the manager of one rollout rank of a separate rollout. Collective over trainer and rollout ranks.

    Args:
        incoming: the sync that comes.
        config: verl's rollout config.
        model_config: verl's.
        server: handle of the rollout server actor.

    Raises:
        ValueError: the model does not fit; names key, value and remedy.
    """
    refuse_family(str(model_config.path), model_config.hf_config.to_dict())
    sync, membership = sync_config_of(config), incoming.membership
    assert membership.ranks is not None, "joined"
    ranks = membership.engine_ranks
    place = ranks.index(membership.ranks.rank)
    # What no sync writes stays what the engine began with: it never releases its weights
    real = not str(config.load_format).startswith("dummy")
    # A server whose driver has released its KV cache flushes when that is back, whatever it is asked
    after_death, seconds = membership.ranks.after_loss, sync.timeout_seconds
    endpoint = ServerActorEndpoint(server, place, ranks, real, seconds, awake_behind_load=True, after_death=after_death)
    say(f"rollout rank {membership.ranks.rank}: engine rank {place} of {len(ranks)}, separate from the trainer")
    return SeparateRollout(membership.ranks, endpoint, sync, trainer_device())
