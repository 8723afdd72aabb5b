# SPDX-License-Identifier: Apache-2.0
"""The weights of a Megatron trainer's rank."""
