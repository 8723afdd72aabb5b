# SPDX-License-Identifier: Apache-2.0
"""What PEFT has put into a model: what weight sync has no part in is refused, and of several adapters one is in use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from verl_sync_plugin.layout.names import clean_name
from verl_sync_plugin.lora.names import is_adapter, plain_name

REMEDY = "Merge the adapter yourself, or set actor_rollout_ref.rollout.custom.sync.enabled=False to run stock verl"

State = tuple[tuple[str, ...], bool, bool]  # adapters that are active, whether they are switched off, and merged


def of_peft(module: torch.nn.Module) -> type | None:
    """The class of PEFT that a module is an instance of; FSDP2 makes subclasses of it."""
    return next((each for each in type(module).__mro__ if each.__module__.partition(".")[0] == "peft"), None)


def carries_adapter(model: torch.nn.Module) -> bool:
    """Whether PEFT has put anything into a model."""
    if "peft" not in sys.modules:
        return False
    return hasattr(model, "peft_config") or any(of_peft(module) for module in model.modules())


def refuse_others(model: torch.nn.Module) -> None:
    """Raises ValueError for adapters and PEFT layers that weight sync would not deliver, with name and type.

    Parameters of such adapters reach the engine neither by themselves nor merged: it would serve the bare base.
    """
    from peft import PeftMixedModel, PeftModel
    from peft.tuners.lora import LoraLayer, LoraModel
    from peft.utils import ModulesToSaveWrapper

    for name, config in (getattr(model, "peft_config", None) or {}).items():
        refuse_config(f"adapter {name!r}", vars(config), REMEDY)
    served = (PeftModel, PeftMixedModel, LoraModel, LoraLayer, ModulesToSaveWrapper)
    for name, module in model.named_modules():
        kind = of_peft(module)
        if kind is not None and not isinstance(module, served) and not is_adapter(f".{name}"):
            raise ValueError(
                f"module {clean_name(name)!r} is a {kind.__name__} of PEFT ({kind.__module__}), and weight sync "
                f"delivers LoRA only. {REMEDY}."
            )


def refuse_config(where: str, settings: dict[str, Any], remedy: str) -> None:
    """Raises ValueError for adapter settings that cannot be seen in any module.

    Args:
        where: whose settings, for the message.
        settings: fields of PEFT's config.
        remedy: what the user can do.
    """
    kind = settings.get("peft_type", "LORA")
    kind = str(getattr(kind, "value", kind))
    if kind != "LORA":
        raise ValueError(f"{where} has peft_type={kind}, and weight sync delivers LoRA only. {remedy}.")
    if settings.get("trainable_token_indices"):
        raise ValueError(
            f"{where} has trainable_token_indices={settings['trainable_token_indices']}: weight sync does not merge "
            f"single rows. Name the embedding in modules_to_save, which trains all of it. {remedy}."
        )
    if settings.get("layer_replication"):
        raise ValueError(
            f"{where} has layer_replication={settings['layer_replication']}: the trained model has other layers than "
            "its config says, and the engine would serve those of the config. Write the model with its layers "
            "replicated to a checkpoint, and train that one without layer_replication."
        )


def copies_in_use(model: torch.nn.Module) -> dict[str, str | None]:
    """Maps each module that PEFT copied to train it whole (``modules_to_save``) to the adapter whose copy computes.

    Returns:
        The adapter by name of the module; ``None`` where it is the module itself.

    Raises:
        ValueError: several adapters are active; names the module.
    """
    from peft.utils import ModulesToSaveWrapper

    found: dict[str, str | None] = {}
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            active = [] if module.disable_adapters else module.active_adapters
            if len(active) > 1:
                raise ValueError(
                    f"module {clean_name(name)!r}, one of modules_to_save, has several active adapters {active}. "
                    "Activate one of them (set_adapter)."
                )
            found[plain_name(clean_name(name))] = next(
                (each for each in active if each in module.modules_to_save), None
            )
    return found


class InUse:
    """Remembers which adapters compute; a later sync that finds others would send weights that nobody trains."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = dict(_switchable(model))
        self._states = self._look()

    def _look(self) -> dict[str, State]:
        return {
            name: (tuple(each.active_adapters), bool(each.disable_adapters), bool(each.merged_adapters))
            for name, each in self._modules.items()
        }

    def check(self) -> None:
        """Raises ValueError, with the name of a module, when other adapters are in use by now."""
        states = self._look()
        if states == self._states:
            return
        name = next(name for name, state in states.items() if state != self._states[name])
        (active, off, merged), (now, now_off, now_merged) = self._states[name], states[name]
        raise ValueError(
            f"module {name!r}: in the first sync the active adapters were {active} (switched off: {off}, merged: "
            f"{merged}), now they are {now} ({now_off}, {now_merged}), and the engine has the former. Go back to these."
        )


def _switchable(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer | ModulesToSaveWrapper):
            yield clean_name(name), module
