"""Direct delivery: from the second sync on the engine ranks read the parameters where they lie, and nothing is staged.

The first sync goes through staging memory, for the model's own load needs whole tensors. An engine rank whose plan
then proves to cover everything says so; if every trainer rank can tell where its parameters are, and every engine rank
can map them, the following syncs are one launch of the copy kernel per engine rank. What cannot be read so (merged
adapters, offloaded parameters, a model that loads some tensors itself) is staged as before.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from verl_sync_plugin.config.settings import KEY_PREFIX, SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.log import say
from verl_sync_plugin.sync.delivery.shared import PeersUnreachableError
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.trainers.base import ParameterSource, rank_in
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.memory.exports import Live
from verl_sync_plugin.transport.memory.live import LiveParameters, NotInPlaceError
from verl_sync_plugin.transport.protocol import Committed, Hello


class Direct:
    """One run's choice; all methods that say so are collective over the trainer ranks.

    Args:
        config: the sync's settings.
        agreement: where ranks settle.
        sender: speaks to the engine rank.
        device: where the trainer computes.
    """

    def __init__(self, config: SyncConfig, agreement: Agreement, sender: BucketSender, device: torch.device) -> None:
        self._config = config
        self._agreement = agreement
        self._sender = sender
        self._device = device
        self._wanted = config.delivery in ("auto", "direct") and config.copy_plan
        self._ready = ""  # the plan of which the engine rank said that it can
        self._answered = ""  # and the one of which it said whether it can
        self._why = "" if config.copy_plan else f"{KEY_PREFIX}.copy_plan is off"
        self._parameters: LiveParameters | None = None
        self._told = ""
        self._lives: tuple[Live, ...] = ()
        self._place = 0
        self.active = False

    def agree(self, plan: Plan, source: ParameterSource, shards: list[Shard], unstaged: bool) -> bool:
        """Collective: decides how this sync is delivered.

        Args:
            plan: agreed on.
            source: of the shards.
            shards: all of this rank.
            unstaged: whether this rank lacks staging memory for the plan.

        Returns:
            Whether staging memory has to be made.

        Raises:
            SyncError: ``delivery=direct``, and a rank cannot.
        """
        live: Live | None = None
        with self._agreement.attempt():
            live = self._look(plan, source, shards)
            if live is not None:
                self._read(plan, source, shards)
        new = live is not None and live.key != self._told
        # What follows hangs on sums alone: an engine rank may have answered otherwise than its peers, or not at all
        unanswered, declined = self._answered != plan.digest, not self._wanted
        flags = torch.tensor([live is None, new, unstaged, unanswered, declined], dtype=torch.int64)
        unable, moved, unstaged_ranks, unanswered_ranks, declined_ranks = self._agreement.sum(
            "choosing the delivery", flags
        ).tolist()
        self.active = not unable
        self._wanted = not declined_ranks  # looking costs as much as a small sync
        if unable and not unanswered_ranks and self._config.delivery == "direct":
            self._refuse()
        if self.active and moved:
            self._exchange(live, source.group)
        return bool(unstaged_ranks) and not self.active

    def _look(self, plan: Plan, source: ParameterSource, shards: list[Shard]) -> Live | None:
        if not self._wanted or self._ready != plan.digest:
            return None
        shared = source.group is not None and dist.get_world_size(source.group) > 1
        if shared and not plan.sharded:
            self._give_up("ranks that share out the model are on several hosts")
        elif type(source).prepare is not ParameterSource.prepare:
            self._give_up("weights are made on the way")
        if not self._wanted:
            return None
        if self._parameters is None or self._parameters.plan is not plan:
            self._parameters = LiveParameters(self._device, plan, rank_in(source.group))
        try:
            return self._parameters.look(shards)
        except NotInPlaceError as error:
            self._give_up(str(error))
            return None

    def _read(self, plan: Plan, source: ParameterSource, shards: list[Shard]) -> None:
        """Waits until the parameters are final, and starts to hash and check them: as early as possible, so that it is
        done before the engine needs the device. If they are staged after all, packing does so again."""
        assert self._parameters is not None, "looked before"
        checks = self._config.verify_hashes, self._config.check_finite
        self._sender.begin(plan, rank_in(source.group), *checks)
        self._sender.read(shards, self._parameters.found)

    def _give_up(self, why: str) -> None:
        """For the rest of the run."""
        self._wanted, self._why, self._parameters = False, why, None
        say(f"parameters are staged, not read where they lie: {why}")

    def _refuse(self) -> None:
        texts = self._agreement.gather("asking why parameters cannot be read", self._why)
        said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
        raise SyncError(f"{KEY_PREFIX}.delivery=direct: {said or 'not yet possible'}. Set it to auto.")

    def _exchange(self, live: Live | None, group: dist.ProcessGroup | None) -> None:
        assert live is not None, "no rank was unable"
        everywhere = self._agreement.gather("telling where parameters lie", live)
        me = dist.get_rank()
        ranks = [me] if group is None else dist.get_process_group_ranks(group)
        self._lives, self._place, self._told = tuple(everywhere[rank] for rank in ranks), ranks.index(me), live.key

    def greet(self, sync_id: str, plan: Plan, hashed: bool, whole: tuple[int, ...]) -> None:
        """Collective: opens the sync; when it returns, every rank's parameters may be read. See ``Delivery.greet``.

        Raises:
            PeersUnreachableError: an engine rank cannot read them; nothing was loaded.
            SyncError: any rank failed.
        """
        unreachable = ""
        with self._agreement.attempt():
            keys = tuple(live.key for live in self._lives)
            hello = Hello(sync_id, plan.digest, (), self._place, self._config.copy_plan, hashed, whole, keys)
            unreachable = self._sender.greet_live(hello, self._lives)
        if self._agreement.settle("reading parameters where they lie", waiting=bool(unreachable)):
            texts = self._agreement.gather("asking why parameters are out of reach", unreachable)
            raise PeersUnreachableError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text))

    def fall_back(self, error: PeersUnreachableError) -> None:
        """Until the engine ranks say again that they can, parameters are staged.

        Raises:
            SyncError: ``delivery=direct`` does not allow that.
        """
        self._ready, self._answered, self.active = "", "", False
        if self._config.delivery == "direct":
            raise SyncError(
                f"{KEY_PREFIX}.delivery=direct: an engine rank cannot read parameters where they lie ({error}). "
                "Set it to auto."
            ) from error
        say(f"an engine rank cannot read parameters where they lie ({error}); they are staged instead")

    def note(self, committed: Committed, plan: Plan) -> None:
        """What the engine rank said at the end of a sync."""
        self._answered, self._ready = plan.digest, "" if committed.obstacle else plan.digest
        if self._wanted and committed.obstacle not in ("", self._why):
            self._why = committed.obstacle
            say(f"parameters are staged, not read where they lie: {self._why}")
