# SPDX-License-Identifier: Apache-2.0
"""Test-only module for VERL_USE_EXTERNAL_MODULES: says in each of verl's processes which verl it is."""

from __future__ import annotations

import verl

print(f"[e2e] verl {verl.__version__} from {verl.__file__}", flush=True)
