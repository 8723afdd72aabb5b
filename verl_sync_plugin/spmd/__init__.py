# SPDX-License-Identifier: Apache-2.0
"""Engines for scripts that ``torchrun`` starts: ``from verl_sync_plugin import SpmdRollout``."""

from verl_sync_plugin.spmd.rollout import Generated, SpmdRollout

__all__ = ["Generated", "SpmdRollout"]
