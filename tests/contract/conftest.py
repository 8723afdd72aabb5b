# SPDX-License-Identifier: Apache-2.0
"""Holds the fixtures of tests whose processes no other module's tests can share, and Megatron's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from worlds import stop

from megatron_cpu import checkpoints
from megatron_cpu.engines import megatron_environment


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Writes a tiny checkpoint of a kind, once, and returns its path."""
    made: dict[str, str] = {}

    def make(kind: str) -> str:
        if kind not in made:
            made[kind] = checkpoints.write(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return make


@pytest.fixture(scope="module")
def sglang_processes() -> Iterator[None]:
    """Fresh processes, which a module's tests share: SGLang changes what is imported before it and after it."""
    stop()
    yield
    stop()


@pytest.fixture(scope="module")
def bridge_processes() -> Iterator[None]:
    """Fresh processes: Megatron on the CPU replaces CUDA functions, which the other tests' processes must not have."""
    stop()
    with megatron_environment():
        yield
    stop()
