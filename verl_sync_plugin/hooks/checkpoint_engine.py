# SPDX-License-Identifier: Apache-2.0
"""verl's checkpoint engine ``sync_plugin``: the syncs of trainers and rollouts that share no GPU.

verl makes one in every actor worker and one in every process that it puts beside an engine rank
(``CheckpointEngineWorker``), and calls them in this order: ``prepare`` in all, ``build_topology`` in the driver,
``init_process_group`` in all, ``send_weights`` here and ``receive_weights`` there, ``finalize`` in all. Our manager
(``hooks/checkpoint_manager.py``) leaves out what says nothing new.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from verl_sync_plugin.config.settings import SEPARATE_BACKEND, SWITCHED_OFF, SyncConfig
from verl_sync_plugin.log import say, say_unused
from verl_sync_plugin.report.file import write_report
from verl_sync_plugin.report.metrics import sent
from verl_sync_plugin.report.notice import say_who_moves
from verl_sync_plugin.rollouts import ROLLOUTS, rollout_of
from verl_sync_plugin.trainers import activation

# Every process of verl's imports this module with verl's registry; the rest is imported by those that sync
if TYPE_CHECKING:
    from verl_sync_plugin.sync.separate.handles import Incoming
    from verl_sync_plugin.sync.separate.managers import SeparateTrainer
    from verl_sync_plugin.sync.separate.membership import Member, Membership
    from verl_sync_plugin.transport.joint import JointRanks


@CheckpointEngineRegistry.register(SEPARATE_BACKEND)
class SyncCheckpointEngine(CheckpointEngine):
    """One process's end of all syncs of a run.

    Args:
        bucket_size: bound on what a rank stages, in bytes, as colocated .
        is_master: whether this is trainer rank 0; verl gives it to trainer ranks alone.
        sync: ``custom.sync``, which the driver writes into ``engine_kwargs``.
        dtype: ``rollout.dtype``.
        rollout: ``rollout.name``; if it is not given, the one there is.

    Raises:
        ValueError: ``custom.sync`` is switched off, or holds what it cannot.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool | None = None,
        sync: Mapping[str, Any] | None = None,
        dtype: str = "bfloat16",
        rollout: str = "",
    ) -> None:
        self._config = SyncConfig.from_mapping(sync)
        if not self._config.enabled:
            raise ValueError(SWITCHED_OFF)
        self._bucket_bytes = bucket_size
        self._dtype, self._rollout = dtype, rollout or next(iter(ROLLOUTS))
        self._trainer = is_master is not None
        self._first = bool(is_master)
        self._membership: Membership | None = None
        self._manager: SeparateTrainer | None = None
        if self._trainer:
            activation.take_over(True)

    def prepare(self, **more: Any) -> Member:
        """What this process says of itself."""
        say_unused("prepare", more)
        from verl_sync_plugin.sync.separate.membership import Membership
        from verl_sync_plugin.trainers.base import trainer_device

        if self._membership is None:
            seconds = self._config.timeout_seconds
            self._membership = Membership(trainer_device(), self._trainer, self._first, seconds)
        return self._membership.describe()

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Member], **more: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """See ``membership.topology``; in the driver."""
        say_unused("build_topology", more)
        from verl_sync_plugin.sync.separate.membership import topology

        return topology(actor_wg_world_size, rollout_world_size, metadata)

    def init_process_group(self, rank: int, members: tuple[Member, ...], **more: Any) -> None:
        """Collective: makes the group anew where somebody has come, gone or been lost."""
        say_unused("init_process_group", more)
        assert self._membership is not None, "prepare() comes first"
        if self._membership.join(rank, members):
            say(f"separate sync: rank {rank} of {len(members)}, {members[rank]}")

    def finalize(self, **more: Any) -> None:
        """Nothing: group and slots are kept for the next sync."""

    async def send_weights(self, weights: Any, global_steps: int | None = None, **more: Any) -> dict[str, float]:
        """One sync of a trainer rank. Collective over trainer and rollout ranks.

        Args:
            weights: the ``ShardStream`` of the plugin's engine.
            global_steps: verl's weight version.

        Returns:
            Of trainer rank 0 what the sync cost, as metrics, which verl's manager hands to its trainer. Where the
            trainer is the plugin's, its own of the rollout's side count (``hooks/trainer.py``).

        Raises:
            SyncError: any rank failed; the same text on every rank.
        """
        from verl_sync_plugin.hooks.worker import sending

        say_unused("send_weights", more)
        assert self._membership is not None and self._membership.ranks is not None, "init_process_group() comes first"
        # Here and not in our worker, since one_step_off and fully_async make verl's own
        with ExitStack() as behind, self._membership.taking_part():
            # Hazard: a failed sync may leave NCCL hanging on the stream, where offloading would wait for it without a
            # bound. So `sending` ends last, when that is aborted.
            behind.enter_context(sending(_engine_of(weights)))
            manager = self._manager_for(weights, self._membership.ranks)
            await manager.update_weights([], global_steps)
            await manager.finish([])
        if not self._first:
            return {}
        say_who_moves(manager.report)
        write_report(manager.report)
        return sent(manager.report.as_dict())

    def _manager_for(self, weights: Any, ranks: JointRanks) -> SeparateTrainer:
        assert self._membership is not None, "joined"
        from verl_sync_plugin.sharding_manager import get_sharding_manager
        from verl_sync_plugin.sync.separate.absent import NoEngine
        from verl_sync_plugin.sync.separate.managers import SeparateTrainer
        from verl_sync_plugin.trainers.base import trainer_device

        before = self._manager
        if before is not None and before.agreement.ranks is ranks:
            return before
        arguments = (weights.engine, self._config, self._bucket_bytes, trainer_device(), self._dtype)
        backend = get_sharding_manager(weights.trainer, self._rollout).backend
        rollout = rollout_of(self._rollout)
        nobody = NoEngine(rollout.refuse_untied, rollout.refuse_adapter)
        manager = SeparateTrainer(ranks, self._membership.own, backend, nobody, *arguments)
        if before is not None:
            before.close()
            manager.take_over(before)
        self._manager = manager
        return manager

    def receive_weights(self, global_steps: int | None = None, **more: Any) -> Incoming:
        """What the rollout adapter receives the sync by; verl hands it over without looking inside."""
        from verl_sync_plugin.sync.separate.handles import Incoming

        say_unused("receive_weights", more)
        assert self._membership is not None and self._membership.ranks is not None, "init_process_group() comes first"
        return Incoming(self._membership, self._membership.ranks)


def _engine_of(weights: Any) -> Any:
    """verl's training engine, whose weights a stream hands out; see ``refuse_plain_stream`` for any other's."""
    from verl_sync_plugin.trainers.conflict import refuse_plain_stream
    from verl_sync_plugin.trainers.shard_stream import ShardStream

    if not isinstance(weights, ShardStream):
        refuse_plain_stream()
    return weights.engine
