# SPDX-License-Identifier: Apache-2.0
"""Test-only module for VERL_USE_EXTERNAL_MODULES: a strategy that no sharding manager of the plugin knows.

verl's ``fsdp_turbo`` needs a package that has no build for the CPU; here its name stands for verl's own FSDP2 engine.
"""

from __future__ import annotations

from typing import Any

from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead


@EngineRegistry.register("language_model", "fsdp_turbo", device="cuda", vendor="nvidia")
class PlainEngine(FSDPEngineWithLMHead):
    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(engine_config, "strategy", "fsdp2")  # the config is frozen
        super().__init__(model_config, engine_config, *args, **kwargs)
