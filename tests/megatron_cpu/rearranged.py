# SPDX-License-Identifier: Apache-2.0
"""A Megatron model whose tensors change places between syncs; module-level, for spawned processes."""

from __future__ import annotations

import copy
from unittest import mock

import torch

from megatron_cpu.engines import Layout, build, stock_export, train_step
from megatron_cpu.stories import LARGE, check_same, manager_of, one_sync
from verl_sync_plugin.trainers.megatron import model as megatron_model
from verl_sync_plugin.trainers.megatron.model import unwrapped


def in_every_way(model_path: str, layout: Layout) -> None:
    """Tensors get other memory, are replaced, and are replaced with the module around them; as long as nothing of that
    happens, the model is not walked again."""
    engine = build(model_path, layout)
    manager = manager_of(engine, LARGE)
    check_same(one_sync(manager), stock_export(engine))
    with mock.patch.object(megatron_model, "held_by", side_effect=AssertionError("walked again")):
        train_step(engine)
        check_same(one_sync(manager), stock_export(engine))
    layers = unwrapped(engine.module[0]).decoder.layers
    for _ in range(2):
        moved = layers[0].self_attention.linear_proj.weight
        moved.data = moved.data + 1
        check_same(one_sync(manager), stock_export(engine))
        replaced = layers[0].self_attention.linear_qkv
        replaced.weight = _more(replaced.weight)
        check_same(one_sync(manager), stock_export(engine))
        module = copy.copy(layers[0].mlp.linear_fc2)
        module.__dict__["_parameters"] = {"weight": _more(module.weight)}
        layers[0].mlp.linear_fc2 = module
        check_same(one_sync(manager), stock_export(engine))
        wrapper = engine.module[0]
        while not hasattr(wrapper.module, "decoder"):
            wrapper = wrapper.module
        wrapper.module = _copied(wrapper.module)
        layers = unwrapped(engine.module[0]).decoder.layers
        check_same(one_sync(manager), stock_export(engine))


def _copied(module: torch.nn.Module) -> torch.nn.Module:
    """The same model in other memory with other weights; process groups and configurations are shared."""
    values = [value for part in module.modules() for value in vars(part).values()]
    shared = {id(value): value for value in values if not isinstance(value, dict | torch.nn.Module)}
    other = copy.deepcopy(module, shared)
    for before, parameter in zip(module.parameters(), other.parameters(), strict=True):
        parameter.__dict__.update(before.__dict__)
        parameter.data += 1
    return other


def _more(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    other = torch.nn.Parameter(parameter.detach() + 1)
    other.__dict__.update(parameter.__dict__)
    return other
