# SPDX-License-Identifier: Apache-2.0
"""Rollout engines, one folder each: how an engine is asked, how it loads, what it needs."""
