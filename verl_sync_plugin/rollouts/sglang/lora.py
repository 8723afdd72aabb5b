# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters that SGLang serves itself: how they are given to it, and whether it computes with all of them.

SGLang 0.5.12 places factors by pieces of their names, and only when a request needs them: it drops what lies in no
layer that it counts, it gives two modules of one layer the same place, and it ends where it finds none. So they are
placed here, in its scheduler processes before any request, and compared where SGLang's layers read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from verl_sync_plugin import compat
from verl_sync_plugin.config.settings import MODEL
from verl_sync_plugin.log import say
from verl_sync_plugin.rollouts.sglang.loader import admitted, answer, loading_scheduler
from verl_sync_plugin.rollouts.sglang.refusals import lacking

Sent = tuple[str, int, int]  # a factor that was sent: its name, its elements, and ``sum_of_bits`` of it
MODULUS = 1 << 64
# Modules of the trainer that SGLang computes in one, or under another name
HELD_IN: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up_proj"),
    "w2": "down_proj",
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj_with_mqa"),
}
# What the path of a language model's layers is made of; that of a tower has other words
_LANGUAGE_MODEL = frozenset({"base_model", "model", "language_model", "text_model", "backbone"})


def served_settings(settings: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """``adapter_config.json`` of an adapter as builtins: ``settings`` are fields of PEFT's ``LoraConfig``, and
    ``target_modules`` those of the factors (``names``): SGLang refuses a module that it does not serve, also where the
    adapter leaves it out."""
    modules = {name.partition(".lora_")[0].rpartition(".")[2] for name in names}
    plain = {key: getattr(value, "value", value) for key, value in settings.items()}  # some of PEFT's are enums
    plain.setdefault("peft_type", "LORA")  # which SGLang requires, and verl 0.9.0 leaves out of a Megatron adapter's
    plain["target_modules"] = sorted(modules)
    return {key: sorted(value) if isinstance(value, set) else value for key, value in plain.items()}


def summary(factors: Mapping[str, torch.Tensor]) -> list[Sent]:
    """Describes the factors (on the host) to SGLang's processes."""
    return [(name, factor.numel(), sum_of_bits(factor)) for name, factor in factors.items()]


def sum_of_bits(factor: torch.Tensor) -> int:
    """Sum of the words that one factor, or several one after another, consist of, modulo 2**64; zeros add nothing."""
    whole = factor.shape[-1] * factor.element_size() % 8 == 0
    return int(factor.contiguous().view(torch.int64 if whole else torch.int16).sum(dtype=torch.int64)) % MODULUS


class LostFactorsError(ValueError):
    """SGLang does not compute with the factors of some modules."""

    def __init__(self, names: Sequence[str], why: str) -> None:
        modules = list(dict.fromkeys(names))
        kinds = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
        more = f" (and {len(modules) - 1} modules more, of {kinds})" if len(modules) > 1 else ""
        super().__init__(
            f"{MODEL}.lora.merge=False: the adapter has factors of {modules[0]}{more}, and {why}. Set "
            f"{MODEL}.lora.merge=True, which serves it merged, or choose other modules by {MODEL}.target_modules or "
            f"{MODEL}.exclude_modules."
        )


@dataclass(frozen=True)
class _Place:
    """The place in which SGLang holds one kind of factor (``first``: A) of one of its modules, whose own name is
    ``leaf``, in a ``layer`` (``None``: embedding or head)."""

    module: Any
    leaf: str
    layer: int | None
    first: bool
    sent: list[Sent]

    @property
    def name(self) -> str:
        return module_of(self.sent[0][0])


def module_of(name: str) -> str:
    """The module of the trainer's that a factor belongs to."""
    return name.partition(".lora_")[0].removeprefix("base_model.model.")


def check(model: torch.nn.Module, named_tensors: list[tuple[Any, torch.Tensor]]) -> None:
    """A loader of SGLang's that loads nothing. Rank 0 answers for all ranks of the engine: what is wrong, or nothing.
    ``named_tensors`` is one pair, whose name is a packed request: folder, adapter, sent (see ``compare_placed``)."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    try:
        folder, adapter, sent = admitted(named_tensors[0][0])
        why = ""
        try:
            compare_placed(loading_scheduler().tp_worker.model_runner.lora_manager, adapter, sent)
        except LostFactorsError as error:
            why = str(error)
        except Exception as error:  # SGLang's own, with which it would end at the first request
            why = f"SGLang cannot place the adapter: {type(error).__name__}: {error}"
        group = get_tp_group()
        said = [""] * group.world_size
        dist.all_gather_object(said, why, group=group.cpu_group)
        if group.rank_in_group == 0:
            answer(folder, next(filter(None, said), ""))
    except Exception as error:
        say(f"the check of an adapter was not answered: {error!r}")


def compare_placed(manager: Any, adapter: str, sent: Sequence[Sent]) -> None:
    """Compares what a rank's layers read with what was sent (see ``summary``); without a name of an adapter only sees
    that there is a layer for each factor. ``manager`` is SGLang's ``LoRAManager``. Raises LostFactorsError, which names
    a module whose factors SGLang does not compute with, and the remedy."""
    from sglang.srt.lora.utils import LoRAType

    places = _places(manager, sent)
    if not adapter:
        return
    uid = next(ref.lora_id for ref in manager.lora_refs.values() if ref.lora_name == adapter)
    held = manager.loras[uid]
    weights = {name: weight for layer in held.layers for name, weight in layer.weights.items()}
    weights.update(held.embedding_layers)
    for key, place in places.items():
        if key not in weights or not _is_sum(weights[key], place.sent):
            raise LostFactorsError([place.name], "SGLang has taken other ones than it was sent")
    manager.fetch_new_loras({uid})
    slot, rank = manager.memory_pool.get_buffer_id(uid), manager.memory_pool.tp_rank
    for key, place in places.items():
        cut = place.module.slice_lora_a_weights if place.first else place.module.slice_lora_b_weights
        part = compat.placed_factor(cut, weights[key], rank)
        kind = LoRAType.LORA_A if place.first else LoRAType.LORA_B
        if place.layer is None:
            buffer = manager.memory_pool.get_embedding_tensor(place.leaf, kind)
        else:
            buffer = manager.memory_pool.get_tensor(place.leaf, place.layer, kind)
        read = buffer[slot][: part.shape[0], : part.shape[1]]
        if not torch.equal(*(each.contiguous().view(torch.int16) for each in (read, part.to(read.device, read.dtype)))):
            raise LostFactorsError([place.name], "SGLang computes with other ones than it was sent")


def _places(manager: Any, sent: Sequence[Sent]) -> dict[str, _Place]:
    """By the name under which SGLang holds a factor, once put together. Raises LostFactorsError."""
    found: dict[str, _Place] = {}
    without: dict[str, list[str]] = {}  # names of modules by why SGLang cannot compute with their factors
    for each in sent:
        path, _, rest = each[0].partition(".lora_")
        parent, _, own = path.rpartition(".")
        try:
            leaf, layer, module = _module(manager, parent, own)
        except ValueError as error:
            without.setdefault(str(error), []).append(module_of(each[0]))
            continue
        place = _Place(module, leaf, layer, rest.startswith(("A", "embedding_A")), [])
        found.setdefault(f"{parent}.{leaf}.lora_{rest}", place).sent.append(each)
    for place in found.values():
        names = [module_of(name) for name, *_ in place.sent]
        if place.leaf not in {name.rpartition(".")[2] for name in names} and (why := lacking(names)):
            without.setdefault(why, []).extend(names)
    for why, names in without.items():
        raise LostFactorsError(names, why)
    return found


def _module(manager: Any, parent: str, own: str) -> tuple[str, int | None, Any]:
    """SGLang's module for a module's factors: its own name, number of layer, itself. Raises ValueError."""
    from sglang.srt.layers.utils import get_layer_id

    layer = get_layer_id(f"{parent}.")
    if layer is None:
        module = {"embed_tokens": manager.embed_tokens_module, "lm_head": manager.lm_head_module}.get(own)
        if module is None:
            raise ValueError("SGLang has no place for these")
        return own, None, module
    modules = manager.lora_modules[layer] if layer < len(manager.lora_modules) else {}
    for leaf in (HELD_IN.get(own, own), own):
        alike = [path for path in modules if path.rpartition(".")[2] == leaf]
        if len(alike) > 1:
            raise ValueError(f"SGLang would give {' and '.join(alike)} the same ones")
        if alike and _ways(alike[0]) == _ways(f"{parent}.{leaf}"):
            return leaf, layer, modules[alike[0]]
    raise ValueError("SGLang has no place for these")


def _ways(path: str) -> tuple[frozenset[str], str]:
    """Splits a path into the model that a layer is in, and all that comes after."""
    above, _, below = path.partition("layers.")
    return frozenset(filter(None, above.split("."))) - _LANGUAGE_MODEL, below


def _is_sum(weight: torch.Tensor, sent: Sequence[Sent]) -> bool:
    """SGLang puts factors one after another, with zeros for a module without any; and repeats A of a module that is one
    for the trainer, too."""
    elements, bits = sum(each[1] for each in sent), sum(each[2] for each in sent) % MODULUS
    times = weight.numel() // elements
    return times > 0 and sum_of_bits(weight) in (bits, bits * times % MODULUS)
