# SPDX-License-Identifier: Apache-2.0
"""Test-only module for VERL_USE_EXTERNAL_MODULES: a teacher is not asked for what SGLang 0.5.12 does not know.

With the plugin and without, verl 0.9.1 asks it for ``detokenize``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import wrapt


def _leave_out(manager: ModuleType) -> None:
    asked = manager._get_teacher_sampling_params

    def known(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {key: value for key, value in asked(*args, **kwargs).items() if key != "detokenize"}

    manager._get_teacher_sampling_params = known  # type: ignore[attr-defined]


wrapt.register_post_import_hook(_leave_out, "verl.experimental.teacher_loop.teacher_manager")
