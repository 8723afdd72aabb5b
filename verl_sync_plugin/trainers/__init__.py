# SPDX-License-Identifier: Apache-2.0
"""A trainer rank's weights, as shards of Hugging Face tensors. Knows verl's training engines and PEFT, no rollout."""
