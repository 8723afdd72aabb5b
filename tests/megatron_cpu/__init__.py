# SPDX-License-Identifier: Apache-2.0
"""Holds what the Megatron tests share, in a package, so that spawned ranks can import it by name."""
