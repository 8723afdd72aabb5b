# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.report [--check]``: the tables of ``docs/results.md``, then the pictures."""

from __future__ import annotations

import sys

from benchmarks.report import plot, table, training_plot

if __name__ == "__main__":
    sys.exit(max(table.main(), plot.main(), training_plot.main()))
