# SPDX-License-Identifier: Apache-2.0
"""What travels: shards, the tensors in them, and the buckets they are cut into. Knows neither trainer nor rollout."""
