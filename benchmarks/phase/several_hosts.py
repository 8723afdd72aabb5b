# SPDX-License-Identifier: Apache-2.0
"""Loaded by verl's processes (``VERL_USE_EXTERNAL_MODULES``): ranks of one machine count as ranks of several hosts.

``RANKS_PER_HOST=2``: ranks 0 and 1 are on the first host, 2 and 3 on the second, and so on. That the network between
them is one is NCCL's to be told (``benchmarks/README.md``).
"""

from __future__ import annotations

import os

from verl_sync_plugin.sync.delivery import reach

_machine = reach.host_name


def host_name() -> str:
    """As many names as there are to be hosts."""
    return f"{_machine()} {int(os.environ.get('RANK', '0')) // int(os.environ['RANKS_PER_HOST'])}"


reach.host_name = host_name
