# SPDX-License-Identifier: Apache-2.0
"""verl-sync-plugin: takes over verl's resharding phase (trainer to rollout weight sync)."""

__version__ = "0.1.0"
