# SPDX-License-Identifier: Apache-2.0
"""The transfer alone, from one trainer process into one real SGLang server."""
