# SPDX-License-Identifier: Apache-2.0
"""Trainer and rollout on GPUs of their own: the same phase, over a network group instead of shared memory."""
