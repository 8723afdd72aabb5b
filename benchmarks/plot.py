# SPDX-License-Identifier: Apache-2.0
"""Rewrites or checks ``benchmarks/results/plot.svg``: ``python -m benchmarks.plot [--check]``."""

from __future__ import annotations

import sys

from benchmarks.report.plot import main

if __name__ == "__main__":
    sys.exit(main())
