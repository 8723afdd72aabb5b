# SPDX-License-Identifier: Apache-2.0
"""One block of LoRA settings for all trainers: ``actor_rollout_ref.model.lora.*``. Imports no torch without LoRA.

verl reads the block for Megatron and the flat keys (``lora_rank``, ``lora_alpha``, ...) for FSDP. With the plugin on,
an FSDP trainer takes either. A value counts as given when it differs from verl's own default. What of an FSDP trainer's
adapter cannot be merged or served is refused in the driver, where its files can be read there; the trainer's ranks
refuse the same in words that name modules (``peft.refuse_others``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from verl_sync_plugin.config.settings import DIFFER, MODEL, lora_rank_of
from verl_sync_plugin.log import say

if TYPE_CHECKING:
    from verl_sync_plugin.rollouts import Rollout

REMEDY = f"Merge the adapter into the checkpoint of {MODEL}.path"
LEAVE_OUT = f"Leave it out of the adapter (see {MODEL}.exclude_modules)"
TIED = (
    "tied: merged they differ, and the engine has one weight for both. Leave them out of the adapter (see "
    f"{MODEL}.exclude_modules). Stock verl would serve wrong weights of them, without an error"
)
_FSDP1 = "actor_rollout_ref.actor.strategy=fsdp and actor_rollout_ref.actor.fsdp_config.use_orig_params=True"
FLAT_LORA_TRAINERS = ("fsdp", "fsdp2")  # verl's strategies that read the flat LoRA keys only

_MODULES = ("target_modules", "exclude_modules", "target_parameters")
# Keys of the block that an FSDP trainer takes; the last one is of vLLM
_TAKEN = ("rank", "alpha", *_MODULES, "merge", "adapter_path", "fully_sharded_loras")
# Fields of PEFT's config that make more of an adapter than factors of linear layers, embeddings and experts
_MORE = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication")


def unify(model: Mapping[str, Any], stock: Mapping[str, Any], engine: Rollout) -> dict[str, Any]:
    """Returns the flat keys that an FSDP trainer needs; empty without LoRA. ``stock`` are verl's defaults; the engine
    is asked where it is to serve the adapter. Raises ValueError, with key, value and remedy, where block and flat keys
    differ, and for a setting that FSDP or the engine does not know."""
    block, stock_block = model.get("lora") or {}, stock.get("lora") or {}
    if model.get("lora_rank") and not block.get("rank"):  # then verl's FSDP engine reads of the block only ``merge``
        if idle := [f"{MODEL}.lora.{k}={v!r}" for k, v in block.items() if k != "merge" and v != stock_block.get(k)]:
            say(f"{', '.join(idle)}: no effect, because {MODEL}.lora_rank is given, and {MODEL}.lora.rank is not")
        block = {"merge": block.get("merge")}

    def given(key: str, flat: str) -> Any:
        """The value under either key."""
        inner, outer = block.get(key), model.get(flat, stock.get(flat))
        if not inner or inner == stock_block.get(key):
            return outer
        if outer not in (stock.get(flat), inner):
            raise ValueError(f"{MODEL}.lora.{key}={inner!r} and {MODEL}.{flat}={outer!r} {DIFFER}")
        return inner

    rank, path = given("rank", "lora_rank"), given("adapter_path", "lora_adapter_path")
    if not rank:
        if path is not None:
            raise ValueError(f"{MODEL}.lora_adapter_path={path!r}: no LoRA rank. Set {MODEL}.lora_rank to its rank.")
        return {}
    for key, value in block.items():
        if key not in _TAKEN and value != stock_block.get(key):
            taken = ", ".join(_TAKEN[:-1])
            raise ValueError(f"{MODEL}.lora.{key}={value!r}: an FSDP trainer takes only {taken}. Remove it.")
    flat = model.get("lora_rank") or model.get("lora_alpha") != stock["lora_alpha"]
    alpha = given("alpha", "lora_alpha") if flat else block.get("alpha") or stock_block["alpha"]  # as verl by that rank
    found = {"lora_rank": rank, "lora_alpha": alpha, "lora_adapter_path": path, **{k: given(k, k) for k in _MODULES}}
    targets = found["target_modules"]
    for name in targets if isinstance(targets, list) else []:
        if name.rpartition(".")[2].startswith("linear_"):
            use = "FSDP has Hugging Face modules. Use for example all-linear or [q_proj,k_proj,v_proj,o_proj]"
            raise ValueError(f"{MODEL}.lora.target_modules={targets!r}: {name!r} is Megatron's name, and {use}.")
    if not block.get("merge"):
        # An adapter that is loaded has modules of its own
        served = _MODULES[2:] if path is not None and isinstance(targets, list) else (_MODULES[0], _MODULES[2])
        keys = {key: f"{MODEL}.{'lora.' * (block.get(key) == found[key])}{key}={found[key]!r}" for key in served}
        engine.refuse_adapter({key: found[key] for key in served}, keys)
    return found


def refuse_config(where: str, settings: Mapping[str, Any]) -> None:
    """Raises ValueError for a config of PEFT's that is no plain LoRA's."""
    kind = settings.get("peft_type", "LORA")
    kind = str(getattr(kind, "value", kind))
    other = {"peft_type": kind} if kind != "LORA" else {}
    for field, value in {**other, **{field: settings[field] for field in _MORE if settings.get(field)}}.items():
        raise ValueError(f"{where} has {field}={value}, and weight sync delivers plain LoRA only. {REMEDY}.")


# ---- what the driver refuses of an adapter and its model


def refuse_lora(model: Any, strategy: str, engine: Rollout) -> None:
    """Raises ValueError for what is wrong with an adapter and its model, whose LoRA keys are unified; reads local files
    only. The engine is asked where it is to serve an existing adapter."""
    if lora_rank_of(model) == 0:
        return
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(model, resolve=True)
    path, settings = plain.get("lora_adapter_path"), plain
    where = f"{MODEL}.target_modules={plain['target_modules']!r}"
    if path is not None:
        where = f"{MODEL}.lora_adapter_path={path!r}"
        if not (settings := _content(path, "adapter_config.json")):
            return
        refuse_config(where, settings)
        if not (plain.get("lora") or {}).get("merge"):
            _refuse_existing(plain, where, settings, engine)
    _refuse_ends(plain, where, settings, strategy)


def _content(folder: str, name: str) -> dict[str, Any]:
    """The content of a JSON file; empty where this machine cannot read it."""
    with suppress(OSError, ValueError):
        return dict(json.loads((Path(folder).expanduser() / name).read_text()))
    return {}


def refuse_unread_rank(model: Any, strategy: str, cause: str = "custom.sync.enabled=False") -> None:
    """Raises ValueError for a run that stock verl (``cause`` says why) would train with all parameters where the plugin
    trains an adapter. ``model`` is as given."""
    block = model.get("lora") or {}
    rank = block.get("rank") or 0
    if strategy in FLAT_LORA_TRAINERS and rank and not model.get("lora_rank"):
        alpha = block.get("alpha") or 32
        raise ValueError(
            f"{MODEL}.lora.rank={rank} with {cause}: verl's own {strategy} engine does not read it, "
            f"and would train all parameters. Give LoRA by verl's flat keys: {MODEL}.lora_rank={rank} "
            f"{MODEL}.lora_alpha={alpha}, and {MODEL}.target_modules; they mean the same with the plugin."
        )


def _refuse_existing(plain: Mapping[str, Any], where: str, settings: Mapping[str, Any], engine: Rollout) -> None:
    """Raises ValueError for an adapter that the engine, launched for the rank and modules of the keys, cannot serve."""
    keys = {field: f"{where}, which has {field}={value!r}" for field, value in settings.items()}
    if isinstance(settings.get("target_modules"), str):
        del keys["target_modules"]  # the engine gets the modules that have factors
    engine.refuse_adapter(settings, keys)
    rank, room = settings.get("r") or 0, plain["lora_rank"]
    if rank > room:
        raise ValueError(f"{MODEL}.lora_rank={room} with {where}, which has r={rank}. Set {MODEL}.lora_rank={rank}.")
    named, adapted = plain["target_modules"], settings.get("target_modules") or ()
    if isinstance(named, list) and isinstance(adapted, list):
        own = {name.rpartition(".")[2] for name in named}
        if others := sorted(name for name in adapted if name.rpartition(".")[2] not in own):
            use = f"Set {MODEL}.target_modules=all-linear, and the adapter's own are adapted"
            also = f"{where}, which adapts {', '.join(others)}, too: the engine makes room only for the former"
            raise ValueError(f"{MODEL}.target_modules={named!r} with {also}. {use}.")


def _refuse_ends(plain: Mapping[str, Any], where: str, settings: Mapping[str, Any], strategy: str) -> None:
    """Raises ValueError for an adapted embedding or head that is tied and merged, or that verl cannot shard."""
    config = _content(plain.get("hf_config_path") or plain["path"], "config.json")
    overrides = plain.get("override_config") or {}
    tied = {**config, **overrides.get("model_config", overrides)}.get("tie_word_embeddings")
    if tied is None or settings.get("target_modules") in (None, "all-linear"):  # PEFT leaves the head out of all-linear
        return
    from peft.tuners.tuners_utils import check_target_module_exists

    modules: Any = SimpleNamespace(**{key: settings.get(key) for key in _MODULES})
    try:
        adapted = [name for name in ("model.embed_tokens", "lm_head") if check_target_module_exists(modules, name)]
    except re.error as error:
        named = f"{MODEL}.target_modules={modules.target_modules!r}"
        raise ValueError(f"{named}: not a valid regular expression ({error})") from error
    if adapted and tied and (plain.get("lora") or {}).get("merge"):
        raise ValueError(f"{where} adapts {adapted[0]}, but embedding and head of {plain['path']} are {TIED}.")
    # verl makes each an FSDP unit, and of an adapted one it shards the outer module before the one inside
    if adapted and not tied and strategy == "fsdp2":
        why = "which verl cannot shard with actor_rollout_ref.actor.strategy=fsdp2"
        raise ValueError(f"{where} adapts {adapted[0]}, {why}. {LEAVE_OUT}, or set {_FSDP1}.")
