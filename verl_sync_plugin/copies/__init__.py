# SPDX-License-Identifier: Apache-2.0
"""Many byte copies at once, hashed on the way: what packs a bucket in the trainer and unpacks it in the engine."""
