# SPDX-License-Identifier: Apache-2.0
"""Holds the fixtures of tests whose processes no other module's tests can share, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
from worlds import stop

from megatron_cpu import checkpoints
from megatron_cpu.engines import Layout, megatron_environment


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Writes a tiny checkpoint of a kind, once, and returns its path."""
    return cache(lambda kind: checkpoints.write(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture
def checkpoint(written: Callable[[str], str], kind: str) -> str:
    """The path of a tiny checkpoint."""
    return written(kind)


@pytest.fixture
def kind() -> str:
    """Of a Megatron test's checkpoint, if it names none."""
    return "qwen2"


@pytest.fixture
def layout() -> Layout:
    """Of a Megatron test's trainer, if it names none."""
    return Layout(2, tp=2)


@pytest.fixture
def qwen2(tiny_model: Callable[[str], str]) -> str:
    """The path of the quickstart's checkpoint."""
    return tiny_model("qwen2")


@pytest.fixture(scope="module")
def fresh_processes() -> Iterator[None]:
    """Shared by a module's tests alone, as those must be in which SGLang changes what is imported."""
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
