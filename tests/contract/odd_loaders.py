# SPDX-License-Identifier: Apache-2.0
"""Loaders that a model may give a parameter of its own: each does more, or another thing, than to copy."""

from __future__ import annotations

import torch


def plus_one(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded + 1)


def last_row_cleared(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded)
    parameter.data[-1].zero_()


def cleared_first(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.zero_()
    parameter.data.copy_(loaded)


def as_words(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.view(torch.int16).copy_(loaded.view(torch.int16))


def negated(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(torch._neg_view(loaded))


def changed_where_it_lies(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    loaded *= 2  # as SGLang's Gemma adds one to its norms
    parameter.data.copy_(loaded)
