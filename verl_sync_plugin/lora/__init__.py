# SPDX-License-Identifier: Apache-2.0
"""LoRA as PEFT defines it: which weights are adapted, and their deltas for part of a weight."""
