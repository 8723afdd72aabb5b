# SPDX-License-Identifier: Apache-2.0
"""Which memory engine ranks can read, that of the ranks of their host, and so where segments have to lie."""

from __future__ import annotations

import socket
from pathlib import Path

import torch.distributed as dist

from verl_sync_plugin.config.settings import KEY_PREFIX, SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.holders import Holders, most_held
from verl_sync_plugin.transport.agreement import Agreement

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Reach:
    """Decides once in a run how plans are laid out.

    Args:
        config: the sync's settings.
        agreement: where ranks settle.

    Attributes:
        possible: plans are sharded: engine ranks read segments from several ranks of their host; ``None`` until
            ``decide``.
        held: the most segments in one slot of a sharded plan.
        several: of a sharded plan, ranks that share one are on several hosts, so segments have to cross.
        hosts: of all ranks; empty where nobody has asked.
        why_sharded: why segments do not just stay where they were packed.
        why_exchanged: why hosts do not exchange segments.
    """

    def __init__(self, config: SyncConfig, agreement: Agreement) -> None:
        self._config = config
        self._agreement = agreement
        self.possible: bool | None = None
        self.held = 1
        self.several = False
        self.hosts: tuple[str, ...] = ()
        self.why_sharded = self.why_exchanged = "no ranks share out the model"

    def decide(self, group: dist.ProcessGroup | None) -> None:
        """Collective, once: finds out how plans are laid out.

        Args:
            group: among whose ranks bases are sharded; ``None`` when every rank holds everything.

        Raises:
            SyncError: ``delivery`` asks by name for what the ranks' hosts do not allow.
        """
        if group is None or dist.get_world_size(group) == 1:
            self.possible = False
            return
        self._find_hosts()
        groups = self._agreement.gather("exchanging groups", tuple(dist.get_process_group_ranks(group)))
        apart = [ranks for ranks in groups if len({self.hosts[rank] for rank in ranks}) > 1]
        where = f"trainer ranks {(apart or groups)[0]}, which share out the model,"
        held = most_held([Holders(ranks, ranks, self.hosts) for ranks in set(groups)])
        self._lay_out(bool(apart), held, (apart or groups)[0], where, "ranks that share out the model are")

    def decide_apart(self) -> None:
        """Collective, once, in place of ``decide`` where trainer and rollout are apart."""
        self._find_hosts()
        ranks = self._agreement.ranks
        # Perhaps not all of the trainer's ranks send
        held = most_held([Holders(ranks.trainers, ranks.rollouts, self.hosts)])
        everyone, several = (*ranks.trainers, *ranks.rollouts), len(set(self.hosts)) > 1
        self._lay_out(several, held, everyone, "trainer and rollout ranks", "trainer and rollout ranks are")
        senders, readers = ({self.hosts[rank] for rank in part} for part in (ranks.trainers, ranks.rollouts))
        fewer, more = len(senders), len(readers - senders)
        if self.possible and several and self._config.delivery in ("auto", "staged") and more > fewer:
            # What is exchanged leaves the trainer's hosts once for every host of engines; what is broadcast goes on
            # from host to host
            self.lose(f"{more} hosts have engines alone and {fewer} send, so the bytes are broadcast")

    def _find_hosts(self) -> None:
        self.hosts = tuple(self._agreement.gather("finding out which ranks share a host", host_name()))

    def _lay_out(self, several: bool, held: int, ranks: tuple[int, ...], who: str, they_are: str) -> None:
        asked = self._config.delivery
        if (several and asked in ("direct", "sharded")) or (not several and asked == "exchanged"):
            where = "several hosts" if several else "one host"
            names = ", ".join(sorted({self.hosts[rank] for rank in ranks}))
            raise SyncError(f"{KEY_PREFIX}.delivery={asked}: {who} are on {where} ({names}). Set it to auto.")
        self.possible, self.several, self.held = asked not in ("gathered", "broadcast"), several, held
        if not self.possible:
            self.why_sharded = self.why_exchanged = f"{KEY_PREFIX}.delivery={asked}"
        elif several:
            self.why_sharded = f"{they_are} on several hosts"
        else:
            self.why_exchanged = f"{they_are} on one host"

    def lose(self, why: str) -> None:
        """Engine ranks do not read their neighbours' memory after all: from now on no plan is sharded."""
        self.possible, self.why_sharded, self.why_exchanged = False, why, why

    def elsewhere(self, ranks: tuple[int, ...], rank: int) -> int:
        """How many of these ranks are on another host than one of them; 0 as long as nobody has asked."""
        return sum(self.hosts[other] != self.hosts[rank] for other in ranks) if self.hosts else 0


def host_name() -> str:
    """Equal for processes that can share memory: one machine, one container."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}".strip()
