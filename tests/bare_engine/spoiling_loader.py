# SPDX-License-Identifier: Apache-2.0
"""A custom loader for tests that spoils what an SGLang rank holds behind the copies of its next sync. Runs in the
scheduler."""

from __future__ import annotations

from typing import Any

import torch

from verl_sync_plugin.engine.load import ModelLoad

DERIVED = ("w_kc", "w_vc")  # of SGLang's latent attention


def negate(model: torch.nn.Module, named_tensors: list[tuple[Any, torch.Tensor]]) -> None:
    """A parameter changes its sign on every rank once the next sync has been loaded, so that the model computes
    something else with bytes that arrived; its name is the only pair's."""
    honest = ModelLoad.finish

    def finish(load: ModelLoad, *args: Any) -> None:
        honest(load, *args)
        ModelLoad.finish = honest  # type: ignore[method-assign]
        dict(model.named_parameters())[named_tensors[0][0]].data.neg_()

    ModelLoad.finish = finish  # type: ignore[method-assign]


def reverse(model: torch.nn.Module, named_tensors: list[tuple[Any, torch.Tensor]]) -> None:
    """The table of rotary angles, which no checkpoint has, runs backwards on every rank once the next sync has been
    loaded, as if the engine had been launched with another config; once more, and it is as before."""
    honest = ModelLoad.finish

    def finish(load: ModelLoad, *args: Any) -> None:
        honest(load, *args)
        ModelLoad.finish = honest  # type: ignore[method-assign]
        tables = {id(table): table for name, table in model.named_buffers() if name.endswith(named_tensors[0][0])}
        assert tables, "the model has no such table"
        for table in tables.values():
            table.copy_(table.flip(0))

    ModelLoad.finish = finish  # type: ignore[method-assign]


def keep_derived(model: torch.nn.Module, named_tensors: list[tuple[Any, torch.Tensor]]) -> None:
    """What latent attention derives from its weights stays on every rank what it was before the next sync, as if that
    had not been derived again; the weights are those of the sync."""
    honest = ModelLoad.finish

    def finish(load: ModelLoad, *args: Any) -> None:
        derived = [(m, name, getattr(m, name).clone()) for m in model.modules() for name in DERIVED if hasattr(m, name)]
        assert derived, "the model derives nothing"
        honest(load, *args)
        ModelLoad.finish = honest  # type: ignore[method-assign]
        for module, name, before in derived:
            assert not torch.equal(getattr(module, name), before), "derived again by the sync"
            setattr(module, name, before)

    ModelLoad.finish = finish  # type: ignore[method-assign]


def spoil(model: torch.nn.Module, named_tensors: list[tuple[Any, torch.Tensor]]) -> None:
    """One bit flips in a parameter of the last rank once the next sync has been loaded; its name is the only pair's."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    group, honest = get_tp_group(), ModelLoad.finish
    if group.rank_in_group != group.world_size - 1:
        return

    def finish(load: ModelLoad, *args: Any) -> None:
        honest(load, *args)
        ModelLoad.finish = honest  # type: ignore[method-assign]
        dict(model.named_parameters())[named_tensors[0][0]].data.view(torch.uint8).view(-1)[71] ^= 128

    ModelLoad.finish = finish  # type: ignore[method-assign]
