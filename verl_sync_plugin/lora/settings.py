# SPDX-License-Identifier: Apache-2.0
"""One block of LoRA settings for all trainers: ``actor_rollout_ref.model.lora.*``. Imports no torch without LoRA.

verl reads the block for Megatron and the flat keys (``lora_rank``, ``lora_alpha``, ...) for FSDP. With the plugin on,
an FSDP trainer takes either. A value counts as given when it differs from verl's own default. What of an FSDP trainer's
adapter cannot be trained or served is refused in the driver, where its files can be read there; the trainer's ranks
refuse the same in words that name modules (``peft.refuse_others``).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from verl_sync_plugin.config.settings import lora_rank_of

if TYPE_CHECKING:
    from verl_sync_plugin.rollouts import Rollout

PREFIX = "actor_rollout_ref.model"
PEFT_KEY = f"{PREFIX}.lora.peft"
LEAVE_OUT = f"Leave embedding and head out (see {PREFIX}.exclude_modules)"
FLAT_LORA_TRAINERS = ("fsdp", "fsdp2")  # verl's strategies that read the flat LoRA keys only

_MODULES = ("target_modules", "exclude_modules", "target_parameters")
# Fields of PEFT's LoraConfig that have a key of their own
_OWN_KEY = {key: key for key in _MODULES} | {"lora_dropout": "dropout", "lora_alpha": "alpha"}
_OWN_KEY |= dict.fromkeys(("r", "lora_rank"), "rank")
_INITIAL_A = {"xavier": True, "kaiming": True, "gaussian": "gaussian", "normal": "gaussian"}
# Fields of PEFT's that are annotated as a dict of anything
_NARROWER = {"rank_pattern": dict[str, int] | None, "alpha_pattern": dict[str, float] | None}
# What FSDP has no counterpart for: key of the block, the only value it can have
_FIXED = {"dropout_position": "pre", "lora_B_init_method": "zero", "a2a_experimental": False, "dtype": None}

# Input and output embeddings of the model families that tie them
_TIED_NAMES = ("model.embed_tokens", "lm_head")
# Replaces fsdp2 where an untied embedding or head is adapted
_FSDP1 = "actor_rollout_ref.actor.strategy=fsdp with actor_rollout_ref.actor.fsdp_config.use_orig_params=True"


def _fail(key: str, value: Any, problem: str, remedy: str) -> ValueError:
    return ValueError(f"{key}={value!r}: {problem}. {remedy}")


def unify(model: Mapping[str, Any], stock: Mapping[str, Any], engine: Rollout) -> dict[str, Any]:
    """Returns the flat keys that an FSDP trainer needs, and under ``lora.peft`` more arguments for PEFT's
    ``LoraConfig``; empty without LoRA. ``stock`` are verl's defaults; the engine is asked where it is
    to serve the adapter. Raises ValueError, with key, value and remedy, where block and flat keys differ, and for a
    setting that FSDP, PEFT or the engine does not know."""
    block, stock_block = model.get("lora") or {}, stock.get("lora") or {}
    _refuse_pefts_own(block, stock_block)

    def given(key: str, flat: str) -> Any:
        """The value under either key; ``None`` when under neither."""
        inner, outer = block.get(key), model.get(flat, stock.get(flat))
        if not inner or inner == stock_block.get(key):
            return None if outer == stock.get(flat) else outer
        if outer not in (stock.get(flat), inner):
            raise ValueError(
                f"{PREFIX}.lora.{key}={inner!r} and {PREFIX}.{flat}={outer!r} are both given and differ. "
                "Remove one of them, or give both the same value."
            )
        return inner

    rank, path = given("rank", "lora_rank"), given("adapter_path", "lora_adapter_path")
    if not rank:
        if path is not None:
            raise _fail(f"{PREFIX}.lora_adapter_path", path, "no LoRA rank", f"Set {PREFIX}.lora_rank to the adapter's")
        return {}
    alpha = given("alpha", "lora_alpha")
    if alpha is None:
        alpha = stock_block["alpha"] if block.get("rank") else stock["lora_alpha"]
    found: dict[str, Any] = {"lora_rank": rank, "lora_alpha": alpha, "lora_adapter_path": path}
    for key in _MODULES:
        value = given(key, key)
        found[key] = stock.get(key) if value is None else value
    targets = found["target_modules"]
    for name in targets if isinstance(targets, list) else []:
        if name.rpartition(".")[2].startswith("linear_"):
            problem = f"{name!r} is Megatron's name, and the FSDP trainer has Hugging Face modules"
            remedy = "Use for example all-linear or [q_proj,k_proj,v_proj,o_proj]."
            raise _fail(f"{PREFIX}.lora.target_modules", targets, problem, remedy)
    found["lora.peft"] = _peft_arguments(block, path)
    for field, value in {**{key: found[key] for key in _MODULES}, **found["lora.peft"]}.items():
        _check_value(field, value, block)
    if not block.get("merge"):
        served = {**found["lora.peft"], **{key: found[key] for key in ("target_parameters", "target_modules")}}
        if path is not None and isinstance(served["target_modules"], list):
            del served["target_modules"]  # the adapter has its own
        engine.refuse_adapter(served, {field: _key_of(field, value, block) for field, value in served.items()})
    return found


def _key_of(field: str, value: Any, block: Mapping[str, Any]) -> str:
    """Key and value under which a field of ``LoraConfig`` was given, for messages."""
    if field in _MODULES:
        return f"{PREFIX}.{'lora.' * (block.get(field) == value)}{field}={value!r}"
    if field == "lora_dropout" and block.get("dropout") == value:
        return f"{PREFIX}.lora.dropout={value!r}"
    if field == "use_dora" and block.get("type") == "dora":
        return f"{PREFIX}.lora.type='dora'"
    return f"{PEFT_KEY}.{field}={value!r}"


def _peft_arguments(block: Mapping[str, Any], path: str | None) -> dict[str, Any]:
    """Reads what the block says beyond verl's flat keys, as arguments of PEFT's ``LoraConfig``."""
    for key, only in _FIXED.items():
        if (value := block.get(key, only)) != only:
            raise _fail(f"{PREFIX}.lora.{key}", value, "the FSDP trainer cannot do it", f"Use {only!r}.")
    found = dict(block.get("peft") or {})
    for key, value in found.items():
        if key in _OWN_KEY and value != block.get(_OWN_KEY[key]):
            raise _fail(f"{PEFT_KEY}.{key}", value, "has a key of its own", f"Use {PREFIX}.lora.{_OWN_KEY[key]}.")
        if key not in _peft_fields():
            hint = _hint(key, list(_peft_fields()), "See PEFT's LoraConfig.")
            raise _fail(f"{PEFT_KEY}.{key}", value, "PEFT's LoraConfig does not know it", hint)
    kind = block.get("type") or "lora"
    if kind == "dora":
        found["use_dora"] = True
    elif kind not in ("lora", "canonical_lora"):
        raise _fail(f"{PREFIX}.lora.type", kind, "the FSDP trainer cannot do it", "Use lora or dora.")
    if block.get("dropout"):
        found["lora_dropout"] = block["dropout"]
    start = block.get("lora_A_init_method") or "xavier"
    if start not in _INITIAL_A:
        raise _fail(f"{PREFIX}.lora.lora_A_init_method", start, "PEFT does not know it", "Use kaiming or gaussian.")
    if _INITIAL_A[start] is not True:
        found["init_lora_weights"] = _INITIAL_A[start]
    if found and path is not None:
        problem = f"the adapter brings its own settings, so {found} have no effect"
        raise _fail(f"{PREFIX}.lora_adapter_path", path, problem, "Remove one of the two.")
    return found


def _hint(word: str, known: list[str], otherwise: str) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"Did you mean {close[0]}?" if close else otherwise


def _refuse_pefts_own(block: Mapping[str, Any], stock: Mapping[str, Any]) -> None:
    """Raises ValueError for a field of PEFT's that is given one level too high, where nothing reads it."""
    for key in block.keys() - stock.keys() - {"peft", "adapter_path", *_MODULES}:
        if key in _OWN_KEY or key in _peft_fields():
            use = f"{PREFIX}.lora.{_OWN_KEY[key]}" if key in _OWN_KEY else f"{PEFT_KEY}.{key}"
            raise _fail(f"{PREFIX}.lora.{key}", block[key], "nothing reads it there", f"Use {use}.")


@functools.cache
def _peft_fields() -> dict[str, Any]:
    """Types of the values that PEFT's ``LoraConfig`` takes, by field."""
    from peft import LoraConfig

    types = {**typing.get_type_hints(LoraConfig), **_NARROWER}
    return {field.name: types[field.name] for field in dataclasses.fields(LoraConfig) if field.init}


def _check_value(field: str, value: Any, block: Mapping[str, Any]) -> None:
    """Raises ValueError for a value that PEFT does not take, or takes for another one; names key, value and remedy."""
    where, kind = _key_of(field, value, block), _peft_fields()[field]
    if not _fits(value, kind):
        said = inspect.formatannotation(kind)
        words = re.findall(r"'(.+?)'", said)  # that a Literal lists
        hint = f"Use [{value}]." if _fits([value], kind) else _hint(str(value), words, "Correct the value.")
        raise ValueError(f"{where}: PEFT takes {said} there. {hint}")
    if field == "init_lora_weights" and value in ("eva", "corda"):
        raise ValueError(f"{where}: PEFT needs data for it, and verl gives it none. Use for example pissa or olora.")
    for pattern in _patterns(field, value):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{where}: not a regular expression ({error}). Correct the pattern.") from None


def _patterns(field: str, value: Any) -> Iterable[str]:
    """Values of a field that PEFT reads as regular expressions; a list of modules has names."""
    if field in (*_MODULES[:2], "layers_pattern") and isinstance(value, str):
        return [value]
    return value or [] if field in (*_NARROWER, "layers_pattern") else []


def _fits(value: Any, kind: Any) -> bool:
    """True if a value from a config, where YAML and JSON agree, is of a type."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in typing.get_args(kind))
    if isinstance(value, str):  # PEFT writes pissa_niter_[number of iters] for pissa_niter_4 and others
        value = re.sub(r"(?<=^pissa_niter_)\d+$", "[number of iters]", value)
    try:
        json.dumps(value, allow_nan=False)
        msgspec.convert(value, kind)
    except (ValueError, msgspec.ValidationError):
        return False
    return True


# ---- PEFT's ``LoraConfig`` of a run


def lora_config(model: Any) -> Any:
    """PEFT's ``LoraConfig`` for verl's ``HFModelConfig``: the flat keys, ``lora.peft``, or the adapter that is loaded.
    Raises ValueError where PEFT refuses the settings."""
    from peft import LoraConfig, PeftConfig, TaskType
    from verl.utils.fs import copy_to_local
    from verl.utils.py_functional import convert_to_regular_types

    path = getattr(model, "lora_adapter_path", None)
    if path is not None:
        return PeftConfig.from_pretrained(copy_to_local(path, use_shm=model.use_shm))
    more = convert_to_regular_types(model.lora.get("peft", None) or {})
    modules = {key: convert_to_regular_types(getattr(model, key)) for key in _MODULES}
    given = {"task_type": TaskType.CAUSAL_LM, "r": model.lora_rank, "lora_alpha": model.lora_alpha, **modules}
    try:
        return LoraConfig(**given, **{"bias": "none", **more})
    except (TypeError, ValueError, ImportError) as error:
        raise ValueError(f"{PEFT_KEY}={more}: PEFT refuses it: {error}. Correct the setting.") from error


def unties_embeddings(model: Any) -> bool:
    """True if the adapter changes one of embedding and head, or each in its own way, where the checkpoint ties them. An
    engine that ties them cannot serve that."""
    if lora_rank_of(model) == 0 or not getattr(model.hf_config, "tie_word_embeddings", False):
        return False
    config = lora_config(model)
    targeted, saved = adapted_ends(config)
    if saved:  # PEFT can save one module for both; the factors that it ties become parameters of their own in FSDP
        return not getattr(config, "ensure_weight_tying", False)
    return bool(targeted)


def adapted_ends(config: Any) -> tuple[list[str], list[str]]:
    """Names of embedding and head that have factors by PEFT's ``LoraConfig``, and of those that it trains whole."""
    from peft.tuners.tuners_utils import check_target_module_exists

    saved = [name for name in _TIED_NAMES for save in config.modules_to_save or () if f".{name}".endswith(f".{save}")]
    if config.target_modules in (None, "all-linear"):  # PEFT leaves the head out of all-linear
        return [], saved
    return [name for name in _TIED_NAMES if check_target_module_exists(config, name)], saved


def refuse_config(where: str, settings: dict[str, Any], remedy: str) -> None:
    """Raises ValueError for settings of PEFT's config that cannot be seen in any module."""
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


# ---- what the driver refuses of an adapter and its model


def refuse_lora(model: Any, strategy: str, engine: Rollout) -> None:
    """Raises ValueError for what is wrong with an adapter and its model, whose LoRA keys are unified; reads local files
    only. The engine is asked where it would need an untied head, and where it is to serve an existing adapter."""
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
    refuse_config(where, settings, f"Give a LoRA adapter, or merge this one into the model of {PREFIX}.path")
    if path is not None and not plain["lora"].get("merge"):
        _refuse_existing(plain, where, settings, engine)
    _refuse_ends(plain, where if path is not None else None, strategy, engine)


def refuse_unread_rank(model: Any, strategy: str, cause: str = "custom.sync.enabled=False") -> None:
    """Raises ValueError for a run that stock verl (``cause`` says why) would train with all parameters where the plugin
    trains an adapter. ``model`` is as given."""
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
    """Raises ValueError for an adapter that is not where this machine would see it; a name of a hub's passes."""
    folder, remedy = Path(path), "Give the whole path of a folder that PEFT has saved an adapter to"
    if not folder.is_dir():
        if path.startswith(("/", ".", "~")) and (folder.parent.is_dir() or Path(model).expanduser().is_dir()):
            raise ValueError(f"{where}: there is no such folder. {remedy}.")
    elif not (folder / "adapter_config.json").is_file():
        raise ValueError(f"{where}: it holds no adapter_config.json. {remedy}.")


def _refuse_existing(plain: Mapping[str, Any], where: str, settings: Mapping[str, Any], engine: Rollout) -> None:
    """Raises ValueError for an adapter that the engine, launched for the rank and modules of the keys, cannot serve."""
    keys = {field: f"{where}, which has {field}={value!r}" for field, value in settings.items()}
    if isinstance(settings.get("target_modules"), str):
        del keys["target_modules"]  # the engine gets the modules that have factors
    engine.refuse_adapter(settings, keys)
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


def _refuse_ends(plain: Mapping[str, Any], where: str | None, strategy: str, engine: Rollout) -> None:
    """Raises ValueError for an adapted embedding or head that trainer or engine cannot have. ``where`` names the
    adapter that is loaded, if one is."""
    config = lora_config(SimpleNamespace(**{"use_shm": False, "target_parameters": None, **plain}))
    targeted, saved = adapted_ends(config)
    if not targeted and not saved:
        return
    said = f"{PREFIX}.target_modules={plain['target_modules']!r}" if targeted else ""
    where = where or said or f"{PEFT_KEY}.modules_to_save={config.modules_to_save!r}"
    if (hf_config := _hf_config(plain)) is None:
        return
    overrides = plain.get("override_config") or {}
    overrides = overrides.get("model_config", overrides)
    tied = bool(overrides.get("tie_word_embeddings", getattr(hf_config, "tie_word_embeddings", False)))
    together = bool(getattr(config, "ensure_weight_tying", False))
    if plain["lora"].get("merge") and not (tied and together and saved):
        engine.refuse_untied(getattr(hf_config, "architectures", None) or (), where)
    if strategy != "fsdp2":
        return
    if tied and together and targeted:
        raise ValueError(
            f"{where} with {PEFT_KEY}.ensure_weight_tying=True: PEFT's factors of the head are transposed views, "
            "which FSDP2 cannot shard. Leave ensure_weight_tying out: the engine is then launched untied."
        )
    # verl makes each an FSDP unit, by name, and every nn.Embedding too: of an adapted or copied embedding it shards the
    # outer module before the one inside. And it reassigns a module's __class__, which Python rejects for PEFT's layers
    if not tied and (targeted or "model.embed_tokens" in saved):
        names = ", ".join(name.rpartition(".")[2] for name in (*targeted, *saved))
        raise ValueError(
            f"{where} with actor_rollout_ref.actor.strategy=fsdp2: verl shards embedding and head by themselves where "
            f"the model does not tie them, and cannot where they are adapted ({names}). Set {_FSDP1}. Or: {LEAVE_OUT}."
        )


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
