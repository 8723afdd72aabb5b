# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m benchmarks.pauses``."""

from __future__ import annotations

import sys

from benchmarks.pauses.measure import main

if __name__ == "__main__":
    sys.exit(main())
