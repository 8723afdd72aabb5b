# SPDX-License-Identifier: Apache-2.0
"""Memory that two processes see."""
