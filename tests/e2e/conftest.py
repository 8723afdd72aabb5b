# SPDX-License-Identifier: Apache-2.0
"""Shared by the end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny_models

# A layer's feed-forward matrices take 1028 KiB each, more than the smallest bucket, and the vocabulary is an odd
# number of rows: with two ranks the tensors are cut unevenly
LARGER = {"intermediate_size": 8224, "vocab_size": 331}


@pytest.fixture(scope="session")
def larger_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with tensors larger than 1 MiB."""
    return tiny_models.write("qwen2", tmp_path_factory.mktemp("models") / "larger", **LARGER)


@pytest.fixture(scope="session")
def even_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a vocabulary that two tensor-parallel ranks can share evenly, as Megatron insists."""
    return tiny_models.write("qwen2", tmp_path_factory.mktemp("models") / "even", **(LARGER | {"vocab_size": 332}))
