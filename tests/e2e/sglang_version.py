# SPDX-License-Identifier: Apache-2.0
"""Test-only module for VERL_USE_EXTERNAL_MODULES: says in each of verl's processes which SGLang it imported."""

from __future__ import annotations

from types import ModuleType

import wrapt


def _say(sglang: ModuleType) -> None:
    print(f"[e2e] SGLang {sglang.__version__} from {sglang.__file__}", flush=True)


wrapt.register_post_import_hook(_say, "sglang")
