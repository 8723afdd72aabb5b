# SPDX-License-Identifier: Apache-2.0
"""What a trainer rank holds, as shards of Hugging Face tensors. Knows verl's training engines and PEFT, no rollout."""
