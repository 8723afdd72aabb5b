# SPDX-License-Identifier: Apache-2.0
"""Runs inside the engine's process, on every one of its ranks. Imports neither verl nor an engine."""
