# SPDX-License-Identifier: Apache-2.0
"""Starts processes that ``--cov`` leaves out, since they are killed before they write what they measured."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_COVERAGE = "COVERAGE_PROCESS_CONFIG"  # how coverage's "subprocess" patch tells a new process to measure itself
_LATER = "SYNC_TEST_COVERAGE"  # the same, for start()


def environment() -> dict[str, str]:
    """This process's environment for a child that is not measured."""
    return {name: value for name, value in os.environ.items() if name != _COVERAGE}


@contextmanager
def children() -> Iterator[None]:
    """Processes started inside are not measured, unless they call ``start``."""
    config = os.environ.pop(_COVERAGE, None)
    if config is None:
        yield
        return
    os.environ[_LATER] = config
    try:
        yield
    finally:
        os.environ[_COVERAGE] = os.environ.pop(_LATER)


def start() -> None:
    """In such a process: it is measured from here on, and its own children are not."""
    config = os.environ.pop(_LATER, None)
    if config is None:
        return
    import coverage

    os.environ[_COVERAGE] = config
    coverage.process_startup()
    del os.environ[_COVERAGE]
