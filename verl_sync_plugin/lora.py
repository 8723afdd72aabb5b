"""LoRA merge out of place, on any consecutive part of a weight. Pure; the deltas are PEFT's own.

``get_delta_weight`` of PEFT's layers computes ``scaling * B @ A`` (transposed for embeddings and Conv1D) from whatever
weights the layer holds. Here it runs on a stand-in of the layer that holds only the rows asked for, in fp32, so
scaling, rsLoRA, rank and alpha patterns follow PEFT, and the base weight is never written.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from verl_sync_plugin.source.naming import clean_name

REMEDY = "merge the adapter yourself, or set actor_rollout_ref.rollout.custom.sync.enabled=False to run stock verl"


@dataclass(frozen=True)
class LoRAWeight:
    """One adapted weight.

    Attributes:
        name: HF name of the weight.
        layer: PEFT's layer.
        adapter: name of its active adapter.
        a: state-dict key of the A factor.
        b: state-dict key of the B factor.
        embedding: the factors of an embedding are laid out the other way round.
    """

    name: str
    layer: Any
    adapter: str
    a: str
    b: str
    embedding: bool


def delta_rows(weight: LoRAWeight, a: torch.Tensor, b: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Rows ``[begin, end)`` of the delta that PEFT would add to the base weight.

    Args:
        weight: which one.
        a: whole A factor, ``(r, in)``; of an embedding ``(r, num_embeddings)``.
        b: whole B factor, ``(out, r)``; of an embedding ``(embedding_dim, r)``.

    Returns:
        fp32 of shape ``(end - begin, columns of the base weight)``.

    Source: ``peft.tuners.lora.layer.Linear.get_delta_weight`` and ``Embedding.get_delta_weight``.
    """
    transposed = weight.embedding or weight.layer.fan_in_fan_out
    if transposed:
        a = a[:, begin:end]
    else:
        b = b[begin:end]
    a, b = a.float(), b.float()
    held = {
        "scaling": weight.layer.scaling,
        "fan_in_fan_out": getattr(weight.layer, "fan_in_fan_out", False),
        "lora_A": {weight.adapter: SimpleNamespace(weight=a)},
        "lora_B": {weight.adapter: SimpleNamespace(weight=b)},
        "lora_embedding_A": {weight.adapter: a},
        "lora_embedding_B": {weight.adapter: b},
    }
    delta: torch.Tensor = type(weight.layer).get_delta_weight(SimpleNamespace(**held), weight.adapter)
    return delta


def merge_run(
    run: torch.Tensor, first: int, start: int, columns: int, weight: LoRAWeight, a: torch.Tensor, b: torch.Tensor
) -> None:
    """Adds the delta to the part of ``weight`` that lies in ``run``.

    Args:
        run: fp32, 1-D; elements ``[first, first + len(run))`` of a flat base. Written in place, so give a copy.
        start: first element of the weight in the base.
        columns: columns of the weight.
    """
    low, high = max(first, start), first + run.numel()
    begin = (low - start) // columns
    end = -(-(high - start) // columns)
    delta = delta_rows(weight, a, b, begin, end).reshape(-1)
    skip = low - start - begin * columns
    count = min(high - low, delta.numel() - skip)
    run[low - first : low - first + count] += delta[skip : skip + count]


def lora_weights(model: torch.nn.Module) -> list[LoRAWeight]:
    """All adapted weights of a PEFT model; names as PEFT's state dict has them, ``base_layer`` included.

    Raises:
        ValueError: an adapter that this version cannot merge; the text names the module.
    """
    from peft.tuners.lora import Embedding, Linear, LoraLayer

    found = []
    for wrapped, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        name = clean_name(wrapped)
        embedding = isinstance(layer, Embedding)
        if type(layer) not in (Embedding, Linear):
            raise ValueError(f"LoRA module {name!r} is a {type(layer).__name__}: weight sync cannot merge it. {REMEDY}")
        for adapter in layer.active_adapters:
            if adapter not in layer.scaling:
                continue
            _refuse_variant(name, layer, adapter)
            factor = "lora_embedding_{}." + adapter if embedding else "lora_{}." + adapter + ".weight"
            a, b = (f"{name}.{factor.format(which)}" for which in "AB")
            found.append(LoRAWeight(f"{name}.base_layer.weight", layer, adapter, a, b, embedding))
    return found


def _refuse_variant(name: str, layer: Any, adapter: str) -> None:
    if layer.merged:
        raise ValueError(f"LoRA module {name!r} is merged into its base weight already. {REMEDY}")
    if len(layer.active_adapters) > 1:
        raise ValueError(f"LoRA module {name!r} has several active adapters {layer.active_adapters}. {REMEDY}")
    if layer.use_dora.get(adapter, False):
        raise ValueError(f"LoRA module {name!r} uses DoRA: weight sync cannot merge it. {REMEDY}")
    if layer.lora_bias.get(adapter, False):
        raise ValueError(f"LoRA module {name!r} has a bias in its B factor: weight sync cannot merge it. {REMEDY}")
