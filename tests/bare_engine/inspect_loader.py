# SPDX-License-Identifier: Apache-2.0
"""A second custom loader for tests: writes what an SGLang rank really holds to a file. Runs in the scheduler."""

from __future__ import annotations

from typing import Any

import torch


def dump(model: torch.nn.Module, named_tensors: list[tuple[Any, torch.Tensor]]) -> None:
    """Saves what the rank holds to ``<path>.<tp rank>``; the path is the name of the only pair.

    That is its state dict, and what DeepSeek's latent attention derives from ``kv_b_proj``.
    """
    from sglang.srt.distributed.parallel_state import get_tp_group

    path = f"{named_tensors[0][0]}.{get_tp_group().rank_in_group}"
    # The first forward pass gives kv_b_proj a second name
    held = {name: tensor for name, tensor in model.state_dict().items() if ".attn_mha." not in name}
    for name, module in model.named_modules():
        held |= {f"{name}.{key}": getattr(module, key) for key in ("w_kc", "w_vc") if hasattr(module, key)}
    torch.save({name: tensor.detach().clone() for name, tensor in held.items()}, path)
