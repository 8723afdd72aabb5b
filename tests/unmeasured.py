"""Processes that ``--cov`` leaves out.

Measuring costs Python processes half as much time again, imports above all. Ray's workers, SGLang's processes and the
contract tests' worlds are killed at their end and never write what they measured, so it would be for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_COVERAGE = "COVERAGE_PROCESS_CONFIG"  # how coverage's "subprocess" patch tells a new process to measure itself


def environment() -> dict[str, str]:
    """This process's environment for a child that is not measured."""
    return {name: value for name, value in os.environ.items() if name != _COVERAGE}


@contextmanager
def children() -> Iterator[None]:
    """Processes started inside are not measured."""
    config = os.environ.pop(_COVERAGE, None)
    try:
        yield
    finally:
        if config is not None:
            os.environ[_COVERAGE] = config
