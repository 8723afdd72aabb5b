"""How what a rank has packed comes to the engine ranks: gathered on every rank, or read where it lies.

*Sharded*: every rank keeps its own segment of a bucket, and the engine ranks read from all ranks of the group what they
need, through memory that the ranks of a host share (CUDA IPC over NVLink or PCIe, shared memory on CPUs). A byte that
an engine rank does not need is never moved to it, and what its own trainer rank holds never leaves the GPU. *Gathered*:
where the ranks of a group are on several hosts, or the GPUs of a host cannot read each other's memory.
"""

from __future__ import annotations

import socket
from pathlib import Path

import torch.distributed as dist

from verl_sync_plugin.config.settings import KEY_PREFIX, SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.log import say
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.memory.exports import StagingExport
from verl_sync_plugin.transport.protocol import Hello, Used

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PeersUnreachableError(RuntimeError):
    """An engine rank cannot read the memory of other trainer ranks; the same text on every rank."""


class Delivery:
    """One run's choice; all methods that say so are collective over the trainer ranks."""

    def __init__(self, config: SyncConfig, agreement: Agreement) -> None:
        self._choice = config.delivery
        self._config = config
        self._agreement = agreement
        self._stagings: tuple[StagingExport, ...] = ()
        self._place = 0
        self._new = False
        self.decided = False
        self.sharded = False

    def decide(self, group: dist.ProcessGroup | None) -> None:
        """Collective, once: whether to deliver sharded.

        Args:
            group: among whose ranks bases are sharded; ``None`` when every rank holds everything.

        Raises:
            SyncError: ``delivery`` is neither ``auto`` nor ``gathered``, and the ranks of a group are on several hosts.
        """
        if self._choice == "gathered" or group is None or dist.get_world_size(group) == 1:
            self.decided = True
            return
        hosts = self._agreement.gather("finding out which ranks share a host", host_name())
        groups = self._agreement.gather("exchanging groups", tuple(dist.get_process_group_ranks(group)))
        apart = [ranks for ranks in groups if len({hosts[rank] for rank in ranks}) > 1]
        if apart and self._choice != "auto":
            raise SyncError(
                f"{KEY_PREFIX}.delivery={self._choice}: trainer ranks {apart[0]}, which share out the model, are on "
                f"several hosts ({', '.join(sorted({hosts[rank] for rank in apart[0]}))}). Set it to auto."
            )
        self.sharded, self.decided = not apart, True

    def exchange(self, sender: BucketSender, group: dist.ProcessGroup | None) -> None:
        """Collective, after ``sender.reserve`` of a new plan: who reads whose slots, and how.

        Raises:
            SyncError: any rank's memory cannot be shared.
        """
        ranks = dist.get_process_group_ranks(group) if self.sharded and group is not None else [dist.get_rank()]
        mine: dict[int, StagingExport] = {}
        with self._agreement.attempt():
            mine = {rank: sender.export(rank) for rank in ranks}
        self._agreement.settle("sharing the staging memory")
        me = dist.get_rank()
        everywhere = self._agreement.gather("exchanging the staging memory", mine) if self.sharded else {me: mine}
        self._stagings = tuple(everywhere[rank][me] for rank in ranks)
        self._place = ranks.index(me)
        self._new = True

    def greet(
        self, sync_id: str, sender: BucketSender, plan: Plan, hashed: bool, whole: tuple[int, ...], tell_use: bool
    ) -> Used | None:
        """Collective: opens the sync with the engine rank beside this rank.

        Args:
            sync_id: names the sync.
            sender: has adopted the channel.
            plan: the buckets.
            hashed: whether hashes are compared.
            whole: tensors that the engine is to hash whole.
            tell_use: ask what the engine's model uses.

        Returns:
            What the engine rank told; ``None`` when it was not asked, or this rank has failed.

        Raises:
            PeersUnreachableError: an engine rank cannot read the memory of other trainer ranks.
            SyncError: any rank failed.
        """
        unreachable, used = "", None
        with self._agreement.attempt():
            does = (self._config.copy_plan, hashed, whole)
            hello = Hello(sync_id, plan.digest, self._stagings, self._place, *does, tell_use=tell_use)
            unreachable, used = sender.greet(hello, plan)
        if not self._new:
            return used
        if self._agreement.settle("opening the staging memory", waiting=bool(unreachable)):
            texts = self._agreement.gather("asking why memory is out of reach", unreachable)
            raise PeersUnreachableError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text))
        sender.opened()
        self._new = False
        return used

    def fall_back(self, error: PeersUnreachableError) -> None:
        """From now on gathered.

        Raises:
            SyncError: ``delivery`` does not allow that.
        """
        if self._choice != "auto":
            raise SyncError(
                f"{KEY_PREFIX}.delivery={self._choice}: an engine rank cannot read other trainer ranks' memory "
                f"({error}). Set it to auto."
            ) from error
        say(f"an engine rank cannot read other trainer ranks' memory ({error}); buckets are gathered instead")
        self.sharded = False


def host_name() -> str:
    """Equal for processes that can share memory: one machine, one container."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}".strip()
