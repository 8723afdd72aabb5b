# SPDX-License-Identifier: Apache-2.0
"""Test-only module for VERL_USE_EXTERNAL_MODULES: says in each process which verl and SGLang it has."""

from __future__ import annotations

from types import ModuleType

import verl
import wrapt


def _say(sglang: ModuleType) -> None:
    print(f"[e2e] SGLang {sglang.__version__} from {sglang.__file__}", flush=True)


print(f"[e2e] verl {verl.__version__} from {verl.__file__}", flush=True)
wrapt.register_post_import_hook(_say, "sglang")
