# SPDX-License-Identifier: Apache-2.0
"""``verl-sync``: looks at an environment, a model or a run without starting one."""

from verl_sync_plugin.cli.entry import main

__all__ = ["main"]
