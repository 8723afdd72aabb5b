# SPDX-License-Identifier: Apache-2.0
"""Proofs about a sync: every byte sent is used, every parameter is written, no byte changed on the way."""
