# SPDX-License-Identifier: Apache-2.0
"""Holds the fixtures of tests whose processes no other module's tests can share, and checkpoints."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import worlds

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
    """The checkpoint of a Megatron test that names none."""
    return "qwen2"


@pytest.fixture
def layout() -> Layout:
    """The trainer of a Megatron test that names none."""
    return Layout(2, tp=2)


@pytest.fixture
def qwen2(tiny_model: Callable[[str], str]) -> str:
    """The path of the quickstart's checkpoint."""
    return tiny_model("qwen2")


@pytest.fixture(scope="module")
def fresh_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes that only the tests of a module share."""
    with worlds.kind(request.path.stem):
        yield


@pytest.fixture(scope="module")
def sglang_processes() -> Iterator[None]:
    """Processes in which SGLang may change what is imported."""
    with worlds.kind("sglang"):
        yield


@pytest.fixture(scope="module")
def bridge_processes() -> Iterator[None]:
    """Processes in which Megatron on the CPU may replace CUDA functions."""
    with worlds.kind("megatron"), megatron_environment():
        yield
