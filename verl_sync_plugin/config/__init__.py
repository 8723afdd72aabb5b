# SPDX-License-Identifier: Apache-2.0
"""The user's settings, and the values that are refused. Imports no torch."""
