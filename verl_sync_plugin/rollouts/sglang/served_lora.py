# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters that SGLang serves itself (``lora.merge=False``): which it can, and in what form it takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from verl_sync_plugin.lora.settings import PREFIX
from verl_sync_plugin.rollouts.sglang.pickling import dumps

if TYPE_CHECKING:
    import torch

# A factor that was sent: its name, its elements, and ``sum_of_bits`` of it
Sent = tuple[str, int, int]
MODULUS = 1 << 64
# Modules that SGLang computes in one, and of which of them it needs factors if it gets any
TOGETHER = ((("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj")), (("gate_proj", "up_proj"), ("gate_proj",)))
# Fields of PEFT's LoraConfig that SGLang drops or misreads
UNSERVABLE = (
    "use_dora",
    "use_rslora",  # it scales by alpha / r whatever this says
    "modules_to_save",
    "bias",
    "lora_bias",
    "target_parameters",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
)


def refuse_adapter(settings: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    """What of an adapter SGLang would drop or misread.

    Args:
        settings: fields of PEFT's ``LoraConfig``.
        keys: under which the user gave them; the fields' own names where there is none. ``target_modules`` are looked
            at where the user gave them: PEFT's own list has modules that the adapter leaves out.

    Raises:
        ValueError: names the setting, its value and the remedy.
    """
    if "target_modules" in keys:
        _refuse_targets(settings["target_modules"], keys["target_modules"])
    for field in UNSERVABLE:
        value = settings.get(field)
        if value and value != "none":
            key = keys.get(field, f"{field}={value!r}")
            raise ValueError(
                f"{PREFIX}.lora.merge=False: SGLang cannot serve an adapter with {key}. "
                f"Set {PREFIX}.lora.merge=True, which serves it merged."
            )


def _refuse_targets(targets: Any, key: str) -> None:
    if isinstance(targets, str):
        why = "" if targets == "all-linear" else "SGLang cannot be told a pattern"
    else:
        why = lacking(targets or ())
    if why:
        raise ValueError(
            f"{PREFIX}.lora.merge=False with {key}: {why}. Name these modules, or all-linear, or set "
            f"{PREFIX}.lora.merge=True, which serves the adapter merged."
        )


def lacking(modules: Iterable[str]) -> str:
    """Why SGLang cannot serve an adapter of these modules alone; empty when it can."""
    own = {name.rpartition(".")[2] for name in modules}
    for together, needed in TOGETHER:
        if own & {*together} and (missing := [name for name in needed if name not in own]):
            return f"SGLang computes {', '.join(together)} in one, and needs factors of {' and '.join(missing)}, too"
    return ""


def refuse_experts(names: Iterable[str]) -> None:
    """Raises ValueError when an adapter has factors of experts, of which SGLang serves some kinds on some devices."""
    found = next((name for name in names if ".experts." in name), "")
    if found:
        raise ValueError(
            f"{PREFIX}.lora.merge=False: the adapter has factors of experts ({found}), and weight sync does not have "
            f"SGLang serve these. Set {PREFIX}.lora.merge=True, which serves it merged, or leave the experts out of "
            f"{PREFIX}.lora.target_modules."
        )


def served_settings(settings: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """``adapter_config.json`` of an adapter as builtins.

    SGLang refuses one that names a module which it does not serve, also where that is left out of the adapter.

    Args:
        settings: fields of PEFT's ``LoraConfig``.
        names: of the adapter's factors; their modules are named for ``target_modules``.
    """
    modules = {name.partition(".lora_")[0].rpartition(".")[2] for name in names}
    plain = {key: getattr(value, "value", value) for key, value in settings.items()}  # some of PEFT's are enums
    plain.setdefault("peft_type", "LORA")  # which SGLang requires, and verl 0.9.0 leaves out of a Megatron adapter's
    plain["target_modules"] = sorted(modules)
    return {key: sorted(value) if isinstance(value, set) else value for key, value in plain.items()}


def summary(factors: Mapping[str, torch.Tensor]) -> list[Sent]:
    """What SGLang's processes are told of the factors that they get, which are on the host."""
    return [(name, factor.numel(), sum_of_bits(factor)) for name, factor in factors.items()]


def sum_of_bits(factor: torch.Tensor) -> int:
    """Sum of the words that one factor, or several one after another, consist of, modulo 2**64; zeros add nothing."""
    import torch

    whole = factor.shape[-1] * factor.element_size() % 8 == 0
    words = factor.contiguous().view(torch.int64 if whole else torch.int16)
    return int(words.sum(dtype=torch.int64)) % MODULUS


def pack_adapter(tensors: dict[str, torch.Tensor]) -> bytes:
    """An adapter as SGLang unpickles it. By value: SGLang keeps adapters in host memory, and one blob serves all ranks.

    A shared handle would be opened by every tensor-parallel rank but counted once, which leaks it on every sync.

    Args:
        tensors: by name; on the host.
    """
    return dumps(tensors)
