# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities by verl's own training engine, the way its trainer computes those of responses."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu


def log_probs(
    engine: Any, prompts: Sequence[Sequence[int]], device: torch.device
) -> Generator[None, None, list[list[float]]]:
    """Of every token of each prompt but its first. Collective over all trainer ranks, which all score all prompts.

    Yields when this rank has loaded its parameters, right before the forward pass with its collectives: one that has
    no memory for them leaves nobody alone there.

    verl's ``infer_batch`` with an active adapter, without gradients, at temperature 1: offloaded parameters are loaded
    for it and offloaded again. Training mode and random state are as before; peak memory is that of a forward
    pass over these tokens.

    Args:
        engine: verl's FSDP2 training engine.
        prompts: token ids, all of one length.
        device: where it computes.
    """
    batch = _batch(prompts, device)
    tu.assign_non_tensor(
        batch,
        use_remove_padding=engine.model_config.get("use_remove_padding", False),
        use_fused_kernels=engine.engine_config.use_fused_kernels,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=len(prompts),
        temperature=1.0,
        calculate_entropy=False,
    )
    with _left_as_before(engine.module, device), engine.eval_mode():
        yield
        output = engine.infer_batch(batch, loss_function=None)
        engine.module.reshard()  # verl leaves the root gathered; its next forward would find it so
    found = output["model_output"]["log_probs"]
    values = found.values() if found.is_nested else found
    rows = values.float().cpu().reshape(len(prompts), -1)
    scored: list[list[float]] = rows[:, :-1].tolist()  # behind the last token comes nothing that is to be predicted
    return scored


def _batch(prompts: Sequence[Sequence[int]], device: torch.device) -> TensorDict:
    """The prompts as verl's engines take them: nested tensors without padding."""
    ids = torch.tensor(prompts, device=device)
    count, length = ids.shape
    offsets = torch.arange(0, count * length + 1, length, device=device)
    positions = torch.arange(length, device=device).repeat(count)
    nested = torch.nested.nested_tensor_from_jagged
    return TensorDict(
        {
            "input_ids": nested(ids.flatten(), offsets=offsets),
            "position_ids": nested(positions, offsets=offsets),
            "loss_mask": torch.ones_like(ids),
        },
        batch_size=[count],
    )


@contextmanager
def _left_as_before(root: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Context behind which random state and the training mode of every module are as before it."""
    modes = [(module, module.training) for module in root.modules()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
