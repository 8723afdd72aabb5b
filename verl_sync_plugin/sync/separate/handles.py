# SPDX-License-Identifier: Apache-2.0
"""What a rollout rank's checkpoint engine hands to its rollout adapter through verl, in place of a weight stream."""

from __future__ import annotations

from dataclasses import dataclass

from verl_sync_plugin.sync.separate.membership import Membership
from verl_sync_plugin.transport.joint import JointRanks


@dataclass(frozen=True, eq=False)
class Incoming:
    """One sync that is about to come; the adapter receives it.

    Attributes:
        membership: this rank among trainer and rollout ranks.
        ranks: all of them; another object where they are others than in the last sync.
    """

    membership: Membership
    ranks: JointRanks
