# SPDX-License-Identifier: Apache-2.0
"""Sharding managers: who owns the resharding phase, by trainer and rollout backend."""

from verl_sync_plugin.sharding_manager.registry import get_sharding_manager, register_sharding_manager

__all__ = ["get_sharding_manager", "register_sharding_manager"]
