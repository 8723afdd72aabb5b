# SPDX-License-Identifier: Apache-2.0
"""Shards, the tensors in them, and the buckets they are cut into. Knows neither trainer nor rollout."""
