# SPDX-License-Identifier: Apache-2.0
"""How long an engine generates with an adapter merged into its weights, and with the adapter served."""
