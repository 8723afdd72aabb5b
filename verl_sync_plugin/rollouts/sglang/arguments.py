# SPDX-License-Identifier: Apache-2.0
"""Keys and arguments for SGLang with which its weights cannot be synced, refused by name before any worker starts.

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from verl_sync_plugin import compat
from verl_sync_plugin.config import refusals
from verl_sync_plugin.config.settings import (
    PREFIX,
    TURN_OFF,
    given_value,
    section,
)

ARGUMENTS = f"{PREFIX}.engine_kwargs.sglang"
AT_LAUNCH = " (as SGLang resolved it at its launch)"

# SGLang's choices for its ``dtype``, but for "auto"
DTYPES = ("bfloat16", "float16", "half", "float32", "float")
# Arguments of SGLang 0.5.12 (``ServerArgs``) that put something else than the model's plain weights into its
# parameters, keep these elsewhere, or share them out over ranks that no trainer rank answers; with the values that do
# nothing of the kind
UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "quantization": (None,),
    "torchao_config": (None, ""),
    "modelopt_quant": (None,),
    "quantize_and_serve": (None, False),
    "rl_quant_profile": (None,),
    "cpu_offload_gb": (None, 0),
    "offload_group_size": (None, -1, 0),
    "kt_weight_path": (None,),
    "pp_size": (None, 1),
    "disaggregation_mode": (None, "null"),
}
NO_DRAFT_MODEL = "NGRAM"  # the ``speculative_algorithm`` that drafts from tokens it has seen
DRAFT = "speculative_draft_model_path"
# Caches of keys and values by tokens alone that SGLang 0.5.12's flush does not clear (``reset`` of its HiRadixCache and
# LMCRadixCache), so that prefixes of earlier weights would be found again behind a sync
OUTLIVING_CACHES: Mapping[str, tuple[Any, ...]] = {
    "hicache_storage_backend": (None,),
    "enable_lmcache": (None, False),
}
# Arguments under which something else than a sync writes weights, or nothing may write them: with the values that do
# nothing of the kind, and what happens. Stock verl goes on with stale weights, or ends, too
OTHER_WRITERS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "elastic_ep_backend": ((None,), "SGLang loads experts of a lost rank from the checkpoint that it started with"),
    "enable_elastic_expert_backup": ((None, False), "SGLang loads experts from the checkpoint that it started with"),
    "encoder_only": ((None, False), "no sync reaches a server that only encodes images"),
    "language_only": ((None, False), "no sync reaches the server that encodes its images"),
    # SGLang >= 0.5.17
    "weight_cache_mode": ((None, "off"), "SGLang ends when weights that it shares are released or updated"),
}
# Loaders that quantize on the way
QUANTIZING_FORMATS = ("bitsandbytes", "gguf", "flash_rl")
# Arguments for SGLang that are second words for keys of verl's rollout: verl and the plugin read the latter
SAME_WORDS = {"dtype": "dtype", "load_format": "load_format", "ep_size": "expert_parallel_size"}
# Arguments that verl finds out by itself, with the remedy
VERLS_OWN = {
    "model_path": "Remove it, and set actor_rollout_ref.model.path.",
    "nnodes": "Remove it: verl counts the nodes of an engine.",
}
# Mixture-of-Experts backends that reorder the experts once they are loaded; a sync writes the order of the checkpoint
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
REORDERING_BACKENDS = ("flashinfer_trtllm", "flashinfer_trtllm_routed", "aiter")


def refuse_keys(rollout: Any, moves: bool) -> None:
    """Everything that SGLang cannot do of a rollout config (dataclass, DictConfig or dict).

    Args:
        rollout: verl's rollout config.
        moves: the plugin moves the weights; otherwise verl's checkpoint engines do.

    Raises:
        ValueError: names key, value and remedy.
    """
    if moves:
        if cause := left_to_verl(rollout):
            raise ValueError(f"{cause}; {TURN_OFF}.")
        refuse_dtype(rollout)
        refuse_engine_arguments(rollout)


def left_to_verl(rollout: Any) -> str:
    """See ``Rollout.left_to_verl``."""
    if cause := refusals.left_to_verl(rollout):
        return cause
    given = engine_arguments(rollout)
    algorithm = given.get("speculative_algorithm", None)
    if algorithm is not None and str(algorithm).upper() != NO_DRAFT_MODEL and not draft_of(given):
        return (
            f"{ARGUMENTS}.speculative_algorithm={algorithm!r} without {ARGUMENTS}.{DRAFT}: the model drafts for "
            "itself, and weight sync has no draft model"
        )
    if rollout.get("dtype", None) == "auto":
        return (
            f"{PREFIX}.dtype='auto': the dtype in which weights travel is not known ({PREFIX}.dtype=bfloat16 says it)"
        )
    return ""


def engine_arguments(rollout: Any) -> Any:
    """The arguments for SGLang of a rollout config.

    Raises:
        ValueError: they are no mapping; names key, value and remedy.
    """
    return section(section(rollout, "engine_kwargs", f"{PREFIX}.engine_kwargs"), "sglang", ARGUMENTS)


def draft_of(arguments: Mapping[str, Any]) -> str:
    """The model with weights of its own that drafts for the one that is trained; empty where there is none. A sync
    leaves it as its checkpoint has it.

    Args:
        arguments: for SGLang.
    """
    return "" if arguments.get("speculative_algorithm", None) is None else str(arguments.get(DRAFT, None) or "")


def refuse_dtype(rollout: Any) -> None:
    """Raises ValueError when ``rollout.dtype`` is none that SGLang holds weights in; names key, value and remedy."""
    dtype = given_value(rollout, "dtype", f"{PREFIX}.dtype")
    if dtype not in (None, "auto", *DTYPES):
        raise ValueError(f"{PREFIX}.dtype={dtype!r}: not a dtype of SGLang's weights. Use one of {', '.join(DTYPES)}.")


def refuse_engine_arguments(rollout: Any) -> None:
    """Names an argument for SGLang under which its weights are not the model's, or lie where no sync reaches them.

    Raises:
        ValueError: names key, value and remedy.
    """
    given = engine_arguments(rollout)
    if (value := rollout.get("load_format", None)) in QUANTIZING_FORMATS:
        raise ValueError(f"{PREFIX}.load_format={value!r}: weight sync cannot serve it; {TURN_OFF}.")
    refuse_arguments(given.get, ARGUMENTS, TURN_OFF)
    _refuse_second_word(rollout, given)


def resolved(manager: Any) -> Callable[[str], Any]:
    """The values of a launched SGLang's arguments; of a dense model, none of what only experts heed.

    Args:
        manager: its tokenizer manager.
    """
    config = getattr(getattr(manager, "model_config", None), "hf_config", None)
    text = getattr(config, "text_config", None) or config
    dense = text is not None and not any(getattr(text, key, None) for key in EXPERT_COUNTS)
    return lambda key: None if dense and key == "moe_runner_backend" else compat.argument(manager, key)


def refuse_arguments(value_of: Callable[[str], Any], where: str, remedy: str, made: str = "") -> None:
    """Judges SGLang's arguments: those that the user gives, and those that a launched SGLang has made of them.

    Args:
        value_of: the value of an argument; ``None`` where there is none.
        where: the key under which a user gives arguments.
        remedy: what helps where the argument cannot be served, in words.
        made: says of a value that the user may not have given it.

    Raises:
        ValueError: names the argument, its value and the remedy.
    """
    for key, harmless in UNSERVED.items():
        if (value := value_of(key)) not in harmless:
            raise ValueError(f"{where}.{key}={value!r}{made}: weight sync cannot serve it; {remedy}.")
    for key, harmless in OUTLIVING_CACHES.items():
        if (value := value_of(key)) not in harmless:
            raise ValueError(
                f"{where}.{key}={value!r}{made}: that cache outlives SGLang's flush, so what was computed with earlier "
                "weights would be found again behind a sync. Remove it."
            )
    for key, (harmless, why) in OTHER_WRITERS.items():
        if (value := value_of(key)) not in harmless:
            raise ValueError(f"{where}.{key}={value!r}{made}: {why}. Remove it.")
    if (value := value_of("load_format")) in QUANTIZING_FORMATS:
        raise ValueError(f"{where}.load_format={value!r}{made}: weight sync cannot serve it; {remedy}.")
    if (value := value_of("moe_runner_backend")) in REORDERING_BACKENDS:
        raise ValueError(
            f"{where}.moe_runner_backend={value!r}{made}: weight sync cannot serve it, for it reorders experts; set "
            f"{where}.moe_runner_backend=triton, or {remedy}."
        )
    overrides = value_of("json_model_override_args")
    if "quantization_config" in _parsed(overrides):
        raise ValueError(
            f"{where}.json_model_override_args={overrides!r}{made}: weight sync sends plain weights. Give it without "
            f"quantization_config, or {remedy}."
        )


def _refuse_second_word(rollout: Any, given: Mapping[str, Any]) -> None:
    """Arguments for which verl has a key: verl plans its ranks, and we the bytes, by that key and not by these."""
    parallel = rollout.get("data_parallel_size", None) or 1
    ranks = (rollout.get("tensor_model_parallel_size", None) or 1) * parallel
    keys = {
        "tp_size": (ranks, f"{PREFIX}.tensor_model_parallel_size, times data_parallel_size, is {ranks}"),
        **{
            key: (rollout.get(ours, None), f"{PREFIX}.{ours} is {rollout.get(ours, None)!r}")
            for key, ours in SAME_WORDS.items()
        },
    }
    if (given.get("moe_dp_size", None) or 1) > 1:
        del keys["ep_size"]  # verl has no key for such a layout
    for key, remedy in VERLS_OWN.items():
        if (value := given.get(key, None)) is not None and (key, value) != ("nnodes", 1):
            raise ValueError(f"{ARGUMENTS}.{key}={value!r}: verl sets it by itself. {remedy}")
    same = {"half": "float16", "float": "float32"}
    for key, (expected, says) in keys.items():
        value = given.get(key, None)
        if value is not None and expected is not None and same.get(value, value) != same.get(expected, expected):
            raise ValueError(f"{ARGUMENTS}.{key}={value!r}: {says}. Remove the former and set the latter.")
    _refuse_data_parallel(given.get("dp_size", None), bool(given.get("enable_dp_attention", False)), parallel, ranks)
    if parallel > 1 and not given.get("enable_dp_attention", False):
        raise ValueError(
            f"{PREFIX}.data_parallel_size={parallel}: SGLang takes weights for data-parallel ranks with DP attention "
            f"only. Set +{ARGUMENTS}.enable_dp_attention=True, or {PREFIX}.data_parallel_size=1."
        )


def _refuse_data_parallel(value: Any, attention: bool, parallel: int, ranks: int) -> None:
    """With DP attention SGLang shares out its own ranks and their number stays; else every one is a rank more."""
    shared_out = attention and isinstance(value, int) and not isinstance(value, bool) and ranks % max(value, 1) == 0
    if value is not None and value != parallel and not shared_out:
        raise ValueError(
            f"{ARGUMENTS}.dp_size={value!r}: {PREFIX}.data_parallel_size is {parallel}. Remove the former and set the "
            f"latter, or set +{ARGUMENTS}.enable_dp_attention=True, by which SGLang shares out its {ranks} ranks."
        )


def changed_config(rollout: Any) -> Mapping[str, Any]:
    """What SGLang is told to change of the model's config."""
    return _parsed(engine_arguments(rollout).get("json_model_override_args", None))


def _parsed(text: Any) -> Mapping[str, Any]:
    """JSON of SGLang's; what is none is SGLang's to refuse."""
    try:
        found = json.loads(text)
    except (TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
