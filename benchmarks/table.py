# SPDX-License-Identifier: Apache-2.0
"""Rewrites or checks the tables of ``docs/results.md``: ``python -m benchmarks.table [--check]``."""

from __future__ import annotations

import sys

from benchmarks.report.table import main

if __name__ == "__main__":
    sys.exit(main())
