# SPDX-License-Identifier: Apache-2.0
"""Lets a test ask for a way of delivery that a user cannot ask for; import it in every process of the test."""

from __future__ import annotations

from verl_sync_plugin.config import settings

settings.GONE_DELIVERIES = ()  # type: ignore[assignment]
settings._KNOWN["delivery"] = str
