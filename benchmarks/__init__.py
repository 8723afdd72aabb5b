# SPDX-License-Identifier: Apache-2.0
"""Timing of the weight sync, stock verl against the plugin, by one harness (see README.md here)."""
