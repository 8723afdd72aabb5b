# SPDX-License-Identifier: Apache-2.0
"""Experts that SGLang keeps in several places, or in another order than a checkpoint has them.

Two ranks of one engine, which share out the experts; each is a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.multiprocessing as mp

from contract import sglang_models as models
from contract.wire import CPU, Wire
from ports import free_port
from verl_sync_plugin.engine.load import refuse_rearranged
from verl_sync_plugin.rollouts.sglang.model import SGLangModel

pytestmark = pytest.mark.slow
KIND = "qwen3-moe"
# The expert of each place, half of them on either rank, where one holds an expert twice; before and after a rebalancing
PLACED = ([0, 0, 1, 2, 3, 4, 5, 6, 7, 1], [2, 3, 3, 4, 5, 0, 6, 6, 7, 1])


def place(experts: list[int], config: Any, rank: int) -> None:
    """Puts SGLang's experts where its load balancing may put them."""
    from sglang.srt.eplb import expert_location
    from sglang.srt.server_args import get_global_server_args

    layers = torch.tensor(experts).repeat(config.hf_config.num_hidden_layers, 1)
    metadata = expert_location.ExpertLocationMetadata.init_by_mapping(get_global_server_args(), config, layers, rank)
    known = expert_location.get_global_expert_location_metadata()
    if known is None:
        expert_location.set_global_expert_location_metadata(metadata)
    else:
        known.update(metadata, update_layer_ids=list(range(len(layers))))


def holds(model: Any, experts: list[int], rank: int, weights: models.Weights) -> None:
    """Every place holds its expert, whoever requests are sent to."""
    sent = dict(weights)
    here = experts[5 * rank : 5 * rank + 5]
    for layer, block in enumerate(model.model.layers):
        for slot, expert in enumerate(here):
            of = f"model.layers.{layer}.mlp.experts.{expert}"
            fused = torch.cat([sent[f"{of}.gate_proj.weight"], sent[f"{of}.up_proj.weight"]])
            assert torch.equal(block.mlp.experts.w13_weight[slot], fused), (layer, slot)
            assert torch.equal(block.mlp.experts.w2_weight[slot], sent[f"{of}.down_proj.weight"]), (layer, slot)


def every_replica_gets_its_weights(config: Any, rank: int) -> None:
    """Also two on one rank, of which SGLang's own load skips one; and after the load was balanced again."""
    place(PLACED[0], config, rank)
    model = models.build(config)
    wire = Wire(model, models.weights_of(KIND, 0), 2, 1 << 16, True)
    for seed in range(1, 7):
        experts = PLACED[seed > 3]
        place(experts, config, rank)
        weights = models.weights_of(KIND, seed)
        assert wire.sync(weights)[0] == len(weights)
        assert not wire.comparison.unwritten, wire.comparison.unwritten
        holds(model, experts, rank, weights)


def experts_in_the_order_of_amd_are_refused(config: Any, rank: int) -> None:
    """SGLang's own method, with a stand-in for the order in which AMD's kernels want the rows."""
    from sglang.srt.layers.quantization import unquant

    model = SGLangModel(models.build(config), rank)
    model.load_weights(iter(models.weights_of(KIND, 1)))
    refuse_rearranged(model, CPU)
    order = mock.patch.object(unquant, "shuffle_weight", lambda weight, layout: weight.flip(1), create=True)
    amd, no_gpu = mock.patch.object(unquant, "_use_aiter", True), mock.patch.object(torch.cuda, "empty_cache")
    refused = pytest.raises(ValueError, match=r"SGLang changes model\.layers\.0\.mlp\.experts\.w13_weight, .*w2_weight")
    with order, amd, no_gpu, refused:
        refuse_rearranged(model, CPU)


def run_rank(rank: int, world: int, folder: str, port: int) -> None:
    """One rank of the engine; entry of a spawned process."""
    torch.set_num_threads(1)
    arguments = {"ep_size": world, "ep_num_redundant_experts": 2}
    config = models.start(Path(folder), KIND, rank, world, port, **arguments)
    with torch.no_grad():
        experts_in_the_order_of_amd_are_refused(config, rank)
        every_replica_gets_its_weights(config, rank)


def test_experts(tmp_path: Path) -> None:
    port = free_port()
    mp.spawn(run_rank, args=(2, str(tmp_path), port), nprocs=2)
