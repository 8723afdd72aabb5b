# SPDX-License-Identifier: Apache-2.0
"""Many syncs in a row, and what grows meanwhile."""
