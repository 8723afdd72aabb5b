# SPDX-License-Identifier: Apache-2.0
"""Loaded by verl's processes (``VERL_USE_EXTERNAL_MODULES``): Megatron's own layers where TransformerEngine is absent.

For stock verl and the plugin alike: what is compared is how the weights travel, not how the trainer computes.
"""

from importlib.util import find_spec

if find_spec("transformer_engine") is None:
    from cpu_stack import local_layers

    local_layers.register_hooks()
