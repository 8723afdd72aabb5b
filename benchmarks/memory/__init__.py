# SPDX-License-Identifier: Apache-2.0
"""How much of a device's memory the rollout may take before a training runs out of it."""
