# SPDX-License-Identifier: Apache-2.0
"""One block of LoRA settings for all trainers: ``actor_rollout_ref.model.lora.*``. Imports no torch.

verl reads the block for Megatron and the flat keys (``lora_rank``, ``lora_alpha``, ...) for FSDP. With the plugin on,
an FSDP trainer takes either. A value counts as given when it differs from verl's own default.
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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

PREFIX = "actor_rollout_ref.model"
PEFT_KEY = f"{PREFIX}.lora.peft"

# (key of the block, flat key)
_PAIRS = (
    ("target_modules", "target_modules"),
    ("exclude_modules", "exclude_modules"),
    ("target_parameters", "target_parameters"),
    ("adapter_path", "lora_adapter_path"),
)
# Fields of PEFT's LoraConfig that have a key of their own
_OWN_KEY = {
    "r": "rank",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    **{key: key for key, _ in _PAIRS[:3]},
}
_INITIAL_A = {"xavier": True, "kaiming": True, "gaussian": "gaussian", "normal": "gaussian"}
# Fields of PEFT's that are annotated as a dict of anything
_NARROWER = {"rank_pattern": dict[str, int] | None, "alpha_pattern": dict[str, float] | None}
_MODULES = ("target_modules", "exclude_modules", "target_parameters")
# What FSDP has no counterpart for: key of the block, the only value it can have
_FIXED = {"dropout_position": "pre", "lora_B_init_method": "zero", "a2a_experimental": False, "dtype": None}

# Refuses an adapter that the engine cannot serve itself: fields of PEFT's ``LoraConfig``, and the keys under which the
# user gave them (``RolloutEndpoint.refuse_adapter``)
RefuseAdapter = Callable[[Mapping[str, Any], Mapping[str, str]], None]


def _fail(key: str, value: Any, problem: str, remedy: str) -> ValueError:
    return ValueError(f"{key}={value!r}: {problem}. {remedy}")


def unify(model: Mapping[str, Any], stock: Mapping[str, Any], refuse_adapter: RefuseAdapter) -> dict[str, Any]:
    """Returns the flat keys that an FSDP trainer needs, from the block and the flat keys together, and under
    ``lora.peft`` more arguments for PEFT's ``LoraConfig``; empty without LoRA. ``stock`` are verl's defaults;
    ``refuse_adapter`` is asked where the engine is to serve the adapter itself. Raises ValueError, with key, value and
    remedy, where both are given and differ, and for a setting that FSDP, PEFT or the engine does not know."""
    block, stock_block = model.get("lora") or {}, stock.get("lora") or {}
    _refuse_pefts_own(block, stock_block)
    rank = _one(model, block, "rank", "lora_rank", 0, 0)
    path = _one(model, block, "adapter_path", "lora_adapter_path", None, None)
    if not rank:
        if path is not None:
            raise _fail(f"{PREFIX}.lora_adapter_path", path, "no LoRA rank", f"Set {PREFIX}.lora_rank to the adapter's")
        return {}
    alphas = stock_block.get("alpha", 32), stock.get("lora_alpha", 16)
    alpha = _one(model, block, "alpha", "lora_alpha", *alphas)
    if alpha is None:
        alpha = alphas[0] if block.get("rank") else alphas[1]
    found: dict[str, Any] = {"lora_rank": rank, "lora_alpha": alpha}
    for key, flat in _PAIRS:
        given = _one(model, block, key, flat, stock_block.get(key), stock.get(flat))
        found[flat] = stock.get(flat) if given is None else given
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
        given = {**found["lora.peft"], **{key: found[key] for key in ("target_parameters", "target_modules")}}
        if path is not None and isinstance(given["target_modules"], list):
            del given["target_modules"]  # the adapter has its own
        refuse_adapter(given, {field: _key_of(field, value, block) for field, value in given.items()})
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


def _one(model: Mapping[str, Any], block: Mapping[str, Any], key: str, flat: str, unset: Any, flat_unset: Any) -> Any:
    """The value given under either key; ``None`` when under neither."""
    inner, outer = block.get(key, unset), model.get(flat, flat_unset)
    if inner == unset or not inner:
        return None if outer == flat_unset else outer
    if outer != flat_unset and outer != inner:
        raise ValueError(
            f"{PREFIX}.lora.{key}={inner!r} and {PREFIX}.{flat}={outer!r} are both given and differ. "
            "Remove one of them, or give both the same value."
        )
    return inner


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
            close = difflib.get_close_matches(key, _peft_fields(), n=1)
            hint = f"Did you mean {close[0]}?" if close else "See PEFT's LoraConfig."
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


def _refuse_pefts_own(block: Mapping[str, Any], stock: Mapping[str, Any]) -> None:
    """Raises ValueError for a field of PEFT's that is given one level too high, where nothing reads it."""
    for key in block.keys() - stock.keys() - {"peft", *(key for key, _ in _PAIRS)}:
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
        words = [each for each in _choices(kind) if isinstance(each, str)]
        close = difflib.get_close_matches(str(value), words, n=1)
        hint = f"Did you mean {close[0]}?" if close else "Correct the value."
        hint = f"Use [{value}]." if _fits([value], kind) else hint
        raise ValueError(f"{where}: PEFT takes {inspect.formatannotation(kind)} there. {hint}")
    if field == "init_lora_weights" and value in ("eva", "corda"):
        raise ValueError(f"{where}: PEFT needs data for it, and verl gives it none. Use for example pissa or olora.")
    for pattern in _patterns(field, value):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{where}: not a regular expression ({error}). Correct the pattern.") from None


def _patterns(field: str, value: Any) -> Iterable[str]:
    """Values of a field that PEFT reads as regular expressions."""
    if field in ("target_modules", "exclude_modules"):  # a list has names
        return [value] if isinstance(value, str) else []
    if field == "layers_pattern":
        return [value] if isinstance(value, str) else value or []
    return value or [] if field in _NARROWER else []


def _choices(kind: Any) -> tuple[Any, ...]:
    """The values that a type lists."""
    inside = typing.get_args(kind)
    return inside if typing.get_origin(kind) is typing.Literal else tuple(c for each in inside for c in _choices(each))


def _fits(value: Any, kind: Any) -> bool:
    """True if a value from a config, where YAML and JSON agree, is of a type."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        # PEFT writes pissa_niter_[number of iters] for pissa_niter_4 and others
        patterns = (re.sub(r"\\\[.*\\\]", r"\\d+", re.escape(each)) for each in typing.get_args(kind))
        return isinstance(value, str) and any(re.fullmatch(each, value) for each in patterns)
    if dataclasses.is_dataclass(kind):
        return isinstance(value, Mapping)  # PEFT makes one of it
    try:
        json.dumps(value, allow_nan=False)
        msgspec.convert(value, kind)
    except (ValueError, msgspec.ValidationError):
        return False
    return True
