# SPDX-License-Identifier: Apache-2.0
"""``python -m verl_sync_plugin.cli`` is the console command."""

import sys

from verl_sync_plugin.cli import main

sys.exit(main())
