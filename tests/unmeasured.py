# SPDX-License-Identifier: Apache-2.0
"""Processes that ``--cov`` leaves out, or measures only from some point on.

Measuring costs Python processes half as much time again, imports above all. Ray's workers, SGLang's processes and the
contract tests' worlds are killed at their end and never write what they measured, so it would be for nothing.
"""

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
