# SPDX-License-Identifier: Apache-2.0
"""What a sync cost, as numbers."""
