# SPDX-License-Identifier: Apache-2.0
"""Custom loaders for tests; they run in SGLang's schedulers. The only pair's name is what a loader is given to do."""

import functools
import time
from pathlib import Path
from typing import Any

import torch

from verl_sync_plugin.engine.load import ModelLoad
from verl_sync_plugin.rollouts.sglang.loader import forget_prefixes, wait_for_forwards

Named = list[tuple[Any, torch.Tensor]]
STALL_SECONDS = 15.0  # at most
FORWARD_SECONDS = 0.004  # at least: a tiny model would have answered before a test can interrupt it


def dump(model: torch.nn.Module, named_tensors: Named) -> None:
    """Saves to ``<path>.<tp rank>`` what the rank holds: its state dict, and what latent attention derives."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    path = f"{named_tensors[0][0]}.{get_tp_group().rank_in_group}"
    # The first forward pass gives kv_b_proj a second name
    held = {name: tensor for name, tensor in model.state_dict().items() if ".attn_mha." not in name}
    for name, module in model.named_modules():
        held |= {f"{name}.{key}": getattr(module, key) for key in ("w_kc", "w_vc") if hasattr(module, key)}
    torch.save({name: tensor.detach().clone() for name, tensor in held.items()}, path)


def spoil(model: torch.nn.Module, named_tensors: Named) -> None:
    """Flips a bit in a parameter of the last rank once the next sync has been loaded."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    group, honest = get_tp_group(), ModelLoad.finish
    if group.rank_in_group != group.world_size - 1:
        return

    def finish(load: ModelLoad, *args: Any) -> None:
        honest(load, *args)
        ModelLoad.finish = honest  # type: ignore[method-assign]
        dict(model.named_parameters())[named_tensors[0][0]].data.view(torch.uint8).view(-1)[71] ^= 128

    ModelLoad.finish = finish  # type: ignore[method-assign]


def load(model: Any, named_tensors: Named) -> None:
    """Takes whole tensors from the request, with what ``loader.load`` does before it writes any."""
    wait_for_forwards(model)
    model.load_weights(named_tensors)


def load_and_forget_prefixes(model: Any, named_tensors: Named) -> None:
    forget_prefixes()
    load(model, named_tensors)


def slow_down(model: torch.nn.Module, named_tensors: Named) -> None:
    """From now on every forward pass takes its time."""
    honest = model.forward

    @functools.wraps(honest)
    def forward(*args: Any, **kwargs: Any) -> Any:
        time.sleep(FORWARD_SECONDS)
        return honest(*args, **kwargs)

    model.forward = forward


def arm(model: Any, named_tensors: Named) -> None:
    """Stops the next load halfway, as a file "stalled" says, until there is "go" in the folder that the pair names."""
    folder, honest = Path(named_tensors[0][0]), model.load_weights

    def load_weights(weights: list[tuple[str, torch.Tensor]]) -> None:
        del model.load_weights
        honest(weights[: len(weights) // 2])
        (folder / "stalled").touch()
        deadline = time.monotonic() + STALL_SECONDS
        while not (folder / "go").exists():
            if time.monotonic() > deadline:
                raise TimeoutError("nobody has let this load go on")
            time.sleep(0.005)
        honest(weights[len(weights) // 2 :])

    model.load_weights = load_weights
