# SPDX-License-Identifier: Apache-2.0
"""Test-only module for VERL_USE_EXTERNAL_MODULES: another plugin that has taken verl's rollout adapter for SGLang."""

from verl.workers.rollout.base import _ROLLOUT_REGISTRY

_ROLLOUT_REGISTRY[("sglang", "async")] = "stranger.adapter.StrangeServerAdapter"
