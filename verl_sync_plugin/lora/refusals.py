# SPDX-License-Identifier: Apache-2.0
"""Refuses in the driver, where its files can be read there, what of an FSDP trainer's adapter cannot be trained or
served.

The trainer's ranks refuse the same in words that name modules (``peft.refuse_others``), or it ends inside verl.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl_sync_plugin.config.settings import lora_rank_of
from verl_sync_plugin.lora.settings import PEFT_KEY, PREFIX, RefuseAdapter

LEAVE_OUT = f"Leave embedding and head out (see {PREFIX}.exclude_modules)"
# Refuses a model whose embedding and head the engine cannot hold apart: architectures, and what makes them differ
# (``RolloutEndpoint.refuse_untied``)
RefuseUntied = Callable[[Iterable[str], str], None]
# verl's strategies that read the flat LoRA keys only
FLAT_LORA_TRAINERS = ("fsdp", "fsdp2")
_FSDP1 = "actor_rollout_ref.actor.strategy=fsdp with actor_rollout_ref.actor.fsdp_config.use_orig_params=True"


def refuse_lora(model: Any, strategy: str, refuse_untied: RefuseUntied, refuse_adapter: RefuseAdapter) -> None:
    """Raises ValueError for what is wrong with an adapter and its model before any worker starts; reads local files
    only. ``model`` has its LoRA keys unified; the engine's two refusals are asked where it would need embedding and
    head apart, and where it is to serve an existing adapter itself."""
    if lora_rank_of(model) == 0:
        return
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(model, resolve=True)
    path = plain.get("lora_adapter_path")
    if path is not None:
        where = f"{PREFIX}.lora_adapter_path={path!r}"
        _refuse_absent(where, path, plain["path"])
        try:
            settings = json.loads((Path(path).expanduser() / "adapter_config.json").read_text())
        except (OSError, ValueError):  # this machine cannot read it
            return
    else:
        settings = plain["lora"].get("peft") or {}
        where = f"{PEFT_KEY}={settings}"
    from verl_sync_plugin.lora.peft import refuse_config

    refuse_config(where, settings, f"Give a LoRA adapter, or merge this one into the model of {PREFIX}.path")
    if path is not None and not plain["lora"].get("merge"):
        _refuse_existing(plain, where, settings, refuse_adapter)
    _refuse_ends(plain, where if path is not None else None, strategy, refuse_untied)


def refuse_unread_rank(model: Any, strategy: str, cause: str = "custom.sync.enabled=False") -> None:
    """Raises ValueError for a run that stock verl (``cause`` says why) would train with all parameters where the plugin
    trains an adapter: nobody would notice. ``model`` is as given."""
    block = model.get("lora") or {}
    rank = block.get("rank") or 0
    if strategy in FLAT_LORA_TRAINERS and rank and not model.get("lora_rank"):
        alpha = block.get("alpha") or 32
        raise ValueError(
            f"{PREFIX}.lora.rank={rank} with {cause}: verl's own {strategy} engine does not read it, "
            f"and would train all parameters. Give LoRA by verl's flat keys: {PREFIX}.lora_rank={rank} "
            f"{PREFIX}.lora_alpha={alpha}, and {PREFIX}.target_modules; they mean the same with the plugin."
        )


def _refuse_absent(where: str, path: str, model: str) -> None:
    """Raises ValueError for an adapter that is not where this machine would see it, as it sees the model; what may be
    the name of one on a hub passes."""
    folder, remedy = Path(path), "Give the whole path of a folder that PEFT has saved an adapter to"
    if not folder.is_dir():
        if path.startswith(("/", ".", "~")) and (folder.parent.is_dir() or Path(model).expanduser().is_dir()):
            raise ValueError(f"{where}: there is no such folder. {remedy}.")
    elif not (folder / "adapter_config.json").is_file():
        raise ValueError(f"{where}: it holds no adapter_config.json. {remedy}.")


def _refuse_existing(
    plain: Mapping[str, Any], where: str, settings: Mapping[str, Any], refuse_adapter: RefuseAdapter
) -> None:
    """Raises ValueError for an adapter that the engine, launched for the rank and modules of the keys, cannot serve."""
    keys = {field: f"{where}, which has {field}={value!r}" for field, value in settings.items()}
    if isinstance(settings.get("target_modules"), str):
        del keys["target_modules"]  # the engine gets the modules that have factors
    refuse_adapter(settings, keys)
    rank, room = settings.get("r") or 0, plain["lora_rank"]
    if rank > room:
        raise ValueError(f"{PREFIX}.lora_rank={room} with {where}, which has r={rank}. Set {PREFIX}.lora_rank={rank}.")
    named, adapted = plain["target_modules"], settings.get("target_modules") or ()
    if isinstance(named, list) and isinstance(adapted, list):
        own = {name.rpartition(".")[2] for name in named}
        if others := sorted(name for name in adapted if name.rpartition(".")[2] not in own):
            raise ValueError(
                f"{PREFIX}.target_modules={named!r} with {where}, which adapts {', '.join(others)}, too: the engine "
                f"makes room for the former. Set {PREFIX}.target_modules=all-linear, and the adapter's own are adapted."
            )


def _refuse_ends(plain: Mapping[str, Any], where: str | None, strategy: str, refuse_untied: RefuseUntied) -> None:
    """Raises ValueError for an adapted embedding or head that trainer or engine cannot have. ``where`` names the
    adapter that is loaded, ``None`` when the keys describe it."""
    from verl_sync_plugin.lora.peft import adapted_ends, lora_config

    keys = {"use_shm": False, "target_parameters": None, **plain}
    config = lora_config(SimpleNamespace(**keys))
    targeted, saved = adapted_ends(config)
    if not targeted and not saved:
        return
    if where is None and targeted:
        where = f"{PREFIX}.target_modules={plain['target_modules']!r}"
    where = where or f"{PEFT_KEY}.modules_to_save={config.modules_to_save!r}"
    hf_config = _hf_config(plain)
    if hf_config is None:
        return
    overrides = plain.get("override_config") or {}
    overrides = overrides.get("model_config", overrides)
    tied = bool(overrides.get("tie_word_embeddings", getattr(hf_config, "tie_word_embeddings", False)))
    together = bool(getattr(config, "ensure_weight_tying", False))
    if plain["lora"].get("merge") and not (tied and together and saved):
        refuse_untied(getattr(hf_config, "architectures", None) or (), where)
    if strategy == "fsdp2":
        _refuse_fsdp2(where, targeted, saved, tied, together)


def _hf_config(plain: Mapping[str, Any]) -> Any:
    """The model's config; ``None`` where it is not in a folder here, or needs code of its own."""
    folder = Path(plain.get("hf_config_path") or plain["path"]).expanduser()
    if not (folder / "config.json").is_file():
        return None
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return None


def _refuse_fsdp2(where: str, targeted: list[str], saved: list[str], tied: bool, together: bool) -> None:
    if tied:
        if together and targeted:
            raise ValueError(
                f"{where} with {PEFT_KEY}.ensure_weight_tying=True: PEFT's factors of the head are transposed views, "
                "which FSDP2 cannot shard. Leave ensure_weight_tying out: the engine is then launched untied."
            )
        return
    # verl makes each an FSDP unit, by name, and every nn.Embedding too: of an adapted or copied embedding it shards the
    # outer module before the one inside. And it reassigns a module's __class__, which Python rejects for PEFT's layers
    if targeted or "model.embed_tokens" in saved:
        names = ", ".join(name.rpartition(".")[2] for name in (*targeted, *saved))
        raise ValueError(
            f"{where} with actor_rollout_ref.actor.strategy=fsdp2: verl shards embedding and head by themselves where "
            f"the model does not tie them, and cannot where they are adapted ({names}). Set {_FSDP1}. Or: {LEAVE_OUT}."
        )
