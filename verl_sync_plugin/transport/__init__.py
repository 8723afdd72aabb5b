# SPDX-License-Identifier: Apache-2.0
"""Carries bytes and messages between trainer ranks and engine ranks."""
