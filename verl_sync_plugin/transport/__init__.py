# SPDX-License-Identifier: Apache-2.0
"""Carries bytes and messages from one trainer rank to the engine rank on the same device."""
