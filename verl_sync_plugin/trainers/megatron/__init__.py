# SPDX-License-Identifier: Apache-2.0
"""What a rank of a Megatron trainer holds."""
