# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m benchmarks.memory``."""

from __future__ import annotations

import sys

from benchmarks.memory.measure import main

if __name__ == "__main__":
    sys.exit(main())
