# SPDX-License-Identifier: Apache-2.0
"""What the user sets, and which values are refused. Imports no torch."""
