# SPDX-License-Identifier: Apache-2.0
"""The transfer from a Megatron trainer on one GPU into an SGLang engine on another, beside another project's."""
