# SPDX-License-Identifier: Apache-2.0
"""A reward for a model that knows nothing: answers must differ in it, or there is no gradient to train with."""

import zlib
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> float:
    """Score an answer by its checksum, so that no two answers tie; verl calls this for every sample."""
    return zlib.crc32(solution_str.encode()) / (1 << 32)
