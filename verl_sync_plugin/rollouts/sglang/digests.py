# SPDX-License-Identifier: Apache-2.0
"""A weight loader that loads nothing: it writes a digest of every parameter that its scheduler rank holds to a file.

For ``verl-sync prove``, whose engine alone lists it. It shares nothing with the code that moves weights: the standard
library hashes the bytes that torch hands over.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from verl_sync_plugin.log import say
from verl_sync_plugin.rollouts.sglang.loader import tensor_parallel_rank
from verl_sync_plugin.rollouts.sglang.request import admitted

LOADER = "verl_sync_plugin.rollouts.sglang.digests.write"


def write(model: torch.nn.Module, named_tensors: list[tuple[Any, torch.Tensor]]) -> None:
    """Writes ``{parameter: digest}`` to ``<path>.<tensor-parallel rank>``; the path is the request of the only pair.

    Never raises, which would end the scheduler: then there is no file.
    """
    try:
        (path,) = admitted(named_tensors[0][0])
        found = digests_of(model)
        Path(f"{path}.{tensor_parallel_rank()}").write_text(json.dumps(found), encoding="utf-8")
    except Exception as error:
        say(f"the digests of the parameters were not written: {error!r}")


def digests_of(model: torch.nn.Module) -> dict[str, str]:
    """A digest of each parameter and persistent buffer of a model, tied ones once under their first name."""
    persistent = set(model.state_dict(keep_vars=True))
    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in persistent)]
    return {name: _digest(tensor.detach()) for name, tensor in named if tensor.numel()}


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()
