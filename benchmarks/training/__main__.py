# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m benchmarks.training``."""

from __future__ import annotations

import sys

from benchmarks.training.measure import main

if __name__ == "__main__":
    sys.exit(main())
