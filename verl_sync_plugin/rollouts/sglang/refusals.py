# SPDX-License-Identifier: Apache-2.0
"""Refuses by name the keys, arguments, models and adapters with which SGLang's weights cannot be synced; what
``rollouts.Rollout`` lists is described there.

A model that no table here names is proven by the first sync of every run: it fails when a tensor is sent that the
engine does not use, or a parameter stays unwritten. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl_sync_plugin.config import refusals
from verl_sync_plugin.config.settings import MODEL, ROLLOUT, TURN_OFF, lora_rank_of, section

ARGUMENTS = f"{ROLLOUT}.engine_kwargs.sglang"
AT_LAUNCH = " (as SGLang resolved it at its launch)"

# SGLang's choices for its ``dtype``, but for "auto"
DTYPES = ("bfloat16", "float16", "half", "float32", "float")
# A refusal of an argument by its name: which values are served, and why any other is not, with the remedy
Rows = Mapping[str, tuple[Callable[[Any], bool], str]]


def only(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def but(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value not in values


UNSERVED = "weight sync cannot serve it. To run it, {remedy}"  # no plain weights, or they lie elsewhere
_OUTLIVES = "SGLang does not flush that cache, so what was computed with earlier weights outlives a sync. Remove it"
_COPIES = "SGLang keeps copies of weights that no update reaches, not even stock verl's. Set it to False"
_REORDERS = "weight sync cannot serve it: it reorders the experts. Set {where}.moe_runner_backend=triton, or {remedy}"
_SHARED = "SGLang ends when weights that it shares are released or updated. Remove it"
_AT_FIRST = "from the checkpoint that it started with. Remove it"
# Arguments of SGLang 0.5.12 and later (``ServerArgs``) that cannot be synced
REFUSED: Rows = {
    "quantization": (only(None, "unquant"), UNSERVED),
    **dict.fromkeys(("modelopt_quant", "rl_quant_profile", "kt_weight_path"), (only(None), UNSERVED)),
    **dict.fromkeys(("quantize_and_serve", "cpu_offload_gb"), (only(None, False, 0), UNSERVED)),
    "torchao_config": (only(None, ""), UNSERVED),
    "offload_group_size": (only(None, -1, 0), UNSERVED),
    **dict.fromkeys(("pp_size", "dwdp_size"), (only(None, 1), UNSERVED)),
    # Decoding reads copies of shards that are made once
    **dict.fromkeys(("dcp_replicate_q_proj", "enable_cp_decode_attn_tp"), (only(None, False), _COPIES)),
    "disaggregation_mode": (only(None, "null"), UNSERVED),
    # ``reset`` of these leaves what is stored elsewhere
    **dict.fromkeys(("hicache_storage_backend", "radix_cache_backend"), (only(None), _OUTLIVES)),
    **dict.fromkeys(
        ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker"), (only(None, False), _OUTLIVES)
    ),
    # Something else than a sync writes weights, or nothing may write them
    "elastic_ep_backend": (only(None), f"SGLang loads experts of a lost rank {_AT_FIRST}"),
    "enable_elastic_expert_backup": (only(None, False), f"SGLang loads experts {_AT_FIRST}"),
    "encoder_only": (only(None, False), "no sync reaches a server that only encodes images. Remove it"),
    "language_only": (only(None, False), "no sync reaches the server that encodes its images. Remove it"),
    "weight_cache_mode": (only(None, "off"), _SHARED),
    "load_format": (but("bitsandbytes", "gguf", "flash_rl"), UNSERVED),  # which quantize on the way
    # Backends that reorder the experts once they are loaded; a sync writes the order of the checkpoint
    "moe_runner_backend": (but("flashinfer_trtllm", "flashinfer_trtllm_routed", "aiter"), _REORDERS),
    "json_model_override_args": (
        lambda value: "quantization_config" not in _parsed(value),
        "weight sync sends plain weights. Give it without quantization_config, or {remedy}",
    ),
}
# What a launched SGLang resolved where verl's ``rollout.quantization`` is fp8
IN_FP8: Rows = {**REFUSED, "quantization": (only("fp8"), UNSERVED), "json_model_override_args": (but(None), UNSERVED)}
_MERGED = f"{MODEL}.lora.merge=True, which serves it merged"
SAME_KEYS = ("dtype", "load_format")  # which verl has, too; SGLang's own wins
# Arguments that verl finds out by itself, or by a key that verl and the plugin read
VERLS_OWN: Rows = {
    "model_path": (only(None), "verl sets it by itself. Remove it, and set actor_rollout_ref.model.path"),
    "nnodes": (only(None, 1), "verl sets it by itself. Remove it: verl counts the nodes of an engine"),
    "tp_size": (only(None), f"verl computes it itself. Remove it, and set {ROLLOUT}.tensor_model_parallel_size"),
}
NO_DRAFT_MODEL = "NGRAM"  # the ``speculative_algorithm`` that drafts from tokens it has seen
DRAFT = "speculative_draft_model_path"
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _classes(names: str, kind: str = "ForCausalLM") -> list[str]:
    return [f"{name}{kind}" for name in names.split()]


# Where SGLang builds experts into every layer, whatever the configuration says about dense ones
EXPERTS_EVERYWHERE = (*_classes("Qwen2Moe Qwen3Moe Qwen3Next"), "Qwen3VLMoeForConditionalGeneration")
# Whose tensors SGLang's class cannot take again and again, and why
UNSYNCABLE = {
    "Llama4ForCausalLM": "its loader for the text model alone knows no experts",
    # apply_ape_hotfix of its compressor
    "DeepseekV4ForCausalLM": "its loader rearranges a parameter after its first load, and after no other",
    "LongcatFlashForCausalLM": "its loader scales norms again with every part that it loads",
    "Qwen4ExpForConditionalGeneration": "its first load moves parameters, which CUDA graphs read where they were",
}

# Modules that SGLang computes in one, and of which of them it needs factors if it gets any
TOGETHER = ((("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj")), (("gate_proj", "up_proj"), ("gate_proj",)))
# Fields of PEFT's LoraConfig that SGLang drops or misreads
UNSERVABLE = (  # of these, use_rslora: it scales by alpha / r whatever that says
    "use_rslora", "bias", "target_parameters", "rank_pattern", "alpha_pattern", "fan_in_fan_out",
)  # fmt: skip
# Architectures of which a sync writes all that the engine's sleep loses: every parameter, and what is computed of them.
# Their models hold no other tensor but buffers, which SGLang brings back itself. All others keep a host copy.
COVERED = (
    *_classes(
        "Llama Mistral Qwen2 Qwen3 Phi Phi3 Gemma Gemma2 Gemma3 Cohere Cohere2 Granite Olmo Olmo2 Starcoder2 StableLm "
        "Glm4 Exaone4 Apertus Arcee SmolLM3 SeedOss HunYuanDenseV1 Ernie4_5 OPT Mixtral Qwen2Moe Qwen3Moe Qwen3Next "
        "Olmoe PhiMoE GptOss GraniteMoe DeepseekV2 DeepseekV3 Glm4Moe Glm4MoeLite Ernie4_5_Moe Lfm2Moe"
    ),
    *_classes("Qwen2VL Qwen2_5_VL Qwen3VL Qwen3VLMoe Qwen3_5 Glm4v Gemma3", "ForConditionalGeneration"),
    "GPT2LMHeadModel",
)


# torch_memory_saver then allocates the copy once; allocated in every sleep, it costs seconds
RETAIN_COPY = "TMS_RETAIN_CPU_BACKUP"


def refuse_keys(rollout: Any) -> None:
    if cause := left_to_verl(rollout):
        raise ValueError(f"{cause}. To run it, {TURN_OFF}.")
    dtype = rollout.get("dtype", None)
    if dtype not in (None, *DTYPES):
        raise ValueError(f"{ROLLOUT}.dtype={dtype!r}: not a dtype of SGLang's weights. Use one of {', '.join(DTYPES)}.")
    given = engine_arguments(rollout)
    refuse_arguments({"load_format": rollout.get("load_format", None)}.get, ROLLOUT, TURN_OFF)
    refuse_arguments(given.get, ARGUMENTS, TURN_OFF)
    ranks = (rollout.get("tensor_model_parallel_size", None) or 1) * (rollout.get("data_parallel_size", None) or 1)
    twice = "tp_size" if given.get("tp_size", None) == ranks else ""
    refuse_arguments(lambda key: None if key == twice else given.get(key, None), ARGUMENTS, rows=VERLS_OWN)
    _refuse_data_parallel(rollout, given, ranks)


def left_to_verl(rollout: Any) -> str:
    if cause := refusals.left_to_verl(rollout):
        return cause
    given = engine_arguments(rollout)
    algorithm = given.get("speculative_algorithm", None)
    if algorithm is not None and str(algorithm).upper() != NO_DRAFT_MODEL and not draft_of(given):
        why = "the model drafts for itself, and weight sync has no draft model"
        return f"{ARGUMENTS}.speculative_algorithm={algorithm!r} without {ARGUMENTS}.{DRAFT}: {why}"
    for key in SAME_KEYS:
        value, verls = given.get(key, None), rollout.get(key, None)
        if value not in (None, verls) and REFUSED.get(key, (but(), ""))[0](value):
            return f"{ARGUMENTS}.{key}={value!r}: weight sync goes by {ROLLOUT}.{key}={verls!r}; set that instead"
    for key in ("cpu_offload_gb", "offload_group_size"):
        if not REFUSED[key][0](value := given.get(key, None)):
            return f"{ARGUMENTS}.{key}={value!r}: weight sync does not reach weights that lie on the host"
    if rollout.get("load_format", None) == "flash_rl":
        return f"{ROLLOUT}.load_format='flash_rl': SGLang quantizes what stock verl sends"
    if rollout.get("dtype", None) == "auto":
        unknown = "the dtype in which weights travel is unknown"
        return f"{ROLLOUT}.dtype='auto': {unknown} ({ROLLOUT}.dtype=bfloat16 says it)"
    return ""


def engine_arguments(rollout: Any) -> Any:
    """The arguments for SGLang of a rollout config."""
    return section(section(rollout, "engine_kwargs", f"{ROLLOUT}.engine_kwargs"), "sglang", ARGUMENTS)


def draft_of(arguments: Mapping[str, Any]) -> str:
    """The model with weights of its own that drafts for the trained one, which no sync writes; empty without one."""
    return "" if arguments.get("speculative_algorithm", None) is None else str(arguments.get(DRAFT, None) or "")


def refuse_arguments(
    value_of: Callable[[str], Any], where: str, remedy: str = "", made: str = "", rows: Rows = REFUSED
) -> None:
    """Judges SGLang's arguments by ``rows``: those that the user gives, and those that a launched SGLang has made of
    them. ``value_of``: the value of an argument, or ``None``; ``where``: the key under which a user gives arguments;
    ``remedy``: in words, where one cannot be served; ``made`` says of a value that the user may not have given it."""
    for key, (served, why) in rows.items():
        if not served(value := value_of(key)):
            raise ValueError(f"{where}.{key}={value!r}{made}: {why.format(where=where, remedy=remedy)}.")


def _refuse_data_parallel(rollout: Any, given: Mapping[str, Any], ranks: int) -> None:
    """verl plans its ranks by its own key, and not by SGLang's ``dp_size``."""
    parallel, attention = rollout.get("data_parallel_size", None) or 1, bool(given.get("enable_dp_attention", False))
    # With DP attention SGLang shares out its own ranks and their number stays; else every one is a rank more
    value = given.get("dp_size", None)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value not in (None, parallel) and not (attention and whole and ranks % max(value, 1) == 0):
        instead = f"or set +{ARGUMENTS}.enable_dp_attention=True, by which SGLang shares out its {ranks} ranks"
        both = f"{ROLLOUT}.data_parallel_size is {parallel}. Remove the former and set the latter"
        raise ValueError(f"{ARGUMENTS}.dp_size={value!r}: {both}, {instead}.")
    if parallel > 1 and not attention:
        why = "SGLang takes weights for data-parallel ranks with DP attention only"
        instead = f"Set +{ARGUMENTS}.enable_dp_attention=True, or {ROLLOUT}.data_parallel_size=1"
        raise ValueError(f"{ROLLOUT}.data_parallel_size={parallel}: {why}. {instead}.")


def _parsed(text: Any) -> Mapping[str, Any]:
    """A JSON object; empty where there is none, which others refuse."""
    try:
        found = json.loads(text)
    except (TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def refuse_checkpoint(path: str, key: str = "", overrides: Any = None, rollout: Any = None) -> None:
    config: Mapping[str, Any] = {}  # of a name on the Hub, a remote folder, or none at all: verl says so
    with suppress(OSError, ValueError):
        config = _parsed((Path(path).expanduser() / "config.json").read_bytes())
    overrides = overrides or {}
    changed = _parsed(engine_arguments(rollout or {}).get("json_model_override_args", None))
    refuse_family(path, {**config, "architectures": changed.get("architectures", config.get("architectures"))}, rollout)
    ours, theirs = _layers(config, overrides.get("model_config", overrides)), _layers(config, changed)
    if config and ours != theirs:
        keys = key, f"{ARGUMENTS}.json_model_override_args"
        given = f"{keys[0]}={overrides}" if overrides else f"{keys[1]}={dict(changed)}"
        change = f"Change both, the trainer's by {keys[0]}, SGLang's by {keys[1]}"
        differ = f"the trainer's model has {ours} layers (num_hidden_layers), SGLang's {theirs}"
        raise ValueError(f"{given}: {differ}. {change}.")


def _layers(config: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    """The number of decoder layers that a changed config names; ``None`` where it does not say."""
    if "num_layers" in changes:  # Megatron's word
        return changes["num_layers"]
    if config.get("text_config"):
        config, changes = config["text_config"], changes.get("text_config") or {}
    return changes.get("num_hidden_layers", config.get("num_hidden_layers"))


def refuse_quantization(rollout: Any, model: Any) -> None:
    """Raises ValueError where ``rollout.quantization`` is another than fp8, or does not go together with other keys."""
    quantization = rollout.get("quantization", None)
    if quantization is None:
        return
    key = f"{ROLLOUT}.quantization={quantization!r}"
    if quantization != "fp8":
        raise ValueError(f"{key}: verl quantizes for SGLang to fp8 alone. Use fp8, or remove it.")
    if overrides := engine_arguments(rollout).get("json_model_override_args", None):
        why = "it replaces the fp8 settings that verl passes in it. Remove one of the two"
        raise ValueError(f"{ARGUMENTS}.json_model_override_args={overrides!r} with {key}: {why}.")
    if draft := draft_of(engine_arguments(rollout)):
        why = "SGLang would read the draft's weights as fp8, without scales. Remove one of the two"
        raise ValueError(f"{ARGUMENTS}.{DRAFT}={draft!r} with {key}: {why}.")
    merge = section(model, "lora", f"{MODEL}.lora").get("merge", False)
    if (rank := lora_rank_of(model)) and not merge:
        why = "SGLang does not find the scales of fp8 base weights under an adapter that it serves"
        other = f"{MODEL}.lora.merge=False and LoRA rank {rank}"
        raise ValueError(f"{key} with {other}: {why}. Set {MODEL}.lora.merge=True.")


def refuse_family(path: str, config: Mapping[str, Any], rollout: Any = None) -> None:
    # verl's fp8 takes the place of the checkpoint's own
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method == "fp8" and (rollout or {}).get("quantization", None) == "fp8":
        config = {key: value for key, value in config.items() if key != "quantization_config"}
    for architecture in config.get("architectures") or ():
        if why := reason_against(architecture, config):
            instead = f"Use another model, or {TURN_OFF}, which raises no error"
            raise ValueError(f"{MODEL}.path={path}: {architecture} {why}. {instead}.")


def reason_against(architecture: str, config: Mapping[str, Any]) -> str:
    """The reason why SGLang cannot be given a model of this architecture and ``config.json``; empty where it can."""
    if architecture in UNSYNCABLE:
        return f"cannot be synced to SGLang: {UNSYNCABLE[architecture]}"
    text: Mapping[str, Any] = config.get("text_config") or config
    if architecture in EXPERTS_EVERYWHERE:
        layers, step = text.get("mlp_only_layers"), text.get("decoder_sparse_step")
        said = f"mlp_only_layers={layers}" if layers else f"decoder_sparse_step={step}" if step not in (None, 1) else ""
        if said:
            return f"with {said} cannot be synced to SGLang: it builds experts into every layer"
    if quantization := config.get("quantization_config") or config.get("compression_config"):
        method = quantization.get("quant_method", "a quantization_config")
        return f"with {method} cannot be synced to SGLang: weights travel unquantized, and its checkpoint is quantized"
    return ""


def refuse_adapter(settings: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    # Where the user gave them: PEFT's own list has modules that the adapter leaves out
    if key := keys.get("target_modules"):
        names = () if settings["target_modules"] == "all-linear" else settings["target_modules"]
        if why := "SGLang takes names of modules only" if isinstance(names, str | None) else lacking(names):
            instead = f"Name these modules, or all-linear, or set {_MERGED}"
            raise ValueError(f"{MODEL}.lora.merge=False with {key}: {why}. {instead}.")
    for field in UNSERVABLE:
        value = settings.get(field)
        if value and value != "none":
            key = keys.get(field, f"{field}={value!r}")
            raise ValueError(f"{MODEL}.lora.merge=False: SGLang cannot serve an adapter with {key}. Set {_MERGED}.")


def lacking(modules: Iterable[str]) -> str:
    """The reason why SGLang cannot serve an adapter of these modules alone; empty when it can."""
    own = {name.rpartition(".")[2] for name in modules}
    for together, needed in TOGETHER:
        if own & {*together} and (missing := [name for name in needed if name not in own]):
            return f"SGLang computes {', '.join(together)} in one, and needs factors of {' and '.join(missing)}, too"
    return ""


def refuse_experts(names: Iterable[str]) -> None:
    """Raises ValueError when an adapter has factors of experts: SGLang serves them for few models and devices."""
    if found := next((name for name in names if ".experts." in name), ""):
        why = f"the adapter has factors of experts ({found}), and weight sync does not have SGLang serve these"
        instead = f"Set {_MERGED}, or leave the experts out of {MODEL}.lora.target_modules"
        raise ValueError(f"{MODEL}.lora.merge=False: {why}. {instead}.")


def keeps_copy(architectures: Collection[str], arguments: Mapping[str, Any]) -> bool:
    """True if SGLang, with these arguments, keeps a host copy of its weights while it sleeps: where it is not known to
    do without for a model of these architectures, holds tables of experts next to it, or is asked for the copy."""
    asked = arguments.get("enable_weights_cpu_backup", False) or os.environ.get("SGLANG_CUTLASS_MOE")
    # With these SGLang builds another class than the checkpoint names
    overrides = _parsed(arguments.get("json_model_override_args", None))
    asked = asked or os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE") or "architectures" in overrides
    backends = {arguments.get(f"moe_{which}_backend", None) for which in ("runner", "a2a")}
    asked = asked or backends & {"cutlass", "flashinfer", "flashinfer_cutlass"}
    return bool(not architectures or {*architectures} - {*COVERED} or asked)
