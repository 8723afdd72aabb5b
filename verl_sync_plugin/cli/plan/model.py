# SPDX-License-Identifier: Apache-2.0
"""A model from its config alone, on torch's meta device: no weight is read and no GPU is needed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Families whose sync is not all copies, by model_type: docs/families.md has them, with the reasons. A test compares
OWN_PATH = {
    "phi": "all tensors, where the engine has several ranks",
    "gemma": "the norms",
    "gemma2": "all tensors",
    "apertus": "all tensors",
    "gpt2": "the attention and MLP weights",
    "qwen3_next": "all tensors",
    "nemotron_h": "all tensors",
    "gpt_oss": "biases of experts and sinks",
    "llama4": "some tensors",
    "qwen3_5": "all tensors",
}
REPLAYED = frozenset(
    {"llama", "qwen2", "qwen3", "mistral", "ministral3", "phi3", "gemma3_text", "cohere", "cohere2", "granite", "olmo"}
    | {"olmo2", "starcoder2", "stablelm", "glm4", "exaone4", "arcee", "smollm3", "seed_oss", "hunyuan_v1_dense"}
    | {"ernie4_5", "lfm2", "opt", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe"}
    | {"granitemoehybrid", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "ernie4_5_moe", "lfm2_moe"}
    | {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "gemma3"}
)


@dataclass(frozen=True)
class Parameter:
    """One parameter, or persistent buffer, of the trainer's model.

    Attributes:
        name: in the HF model.
        shape: full shape.
        itemsize: bytes per element on the wire.
        unit: the module that FSDP wraps on its own; empty for what belongs to the root.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    unit: str

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Model:
    """What a plan needs of a model.

    Attributes:
        path: as given.
        model_type: HF's.
        layers: of the language model.
        experts: per layer, 0 without.
        parameters: in model order; tied ones once.
    """

    path: str
    model_type: str
    layers: int
    experts: int
    parameters: tuple[Parameter, ...]

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def nbytes(self) -> int:
        return sum(parameter.numel * parameter.itemsize for parameter in self.parameters)


def read_model(path: str) -> Model:
    """The model of a folder with a ``config.json``, or of a name on the Hub.

    Raises:
        ValueError: there is none, or transformers does not know it; one line with a remedy.
    """
    config = _read_config(path)
    module = _build(path, config)
    text = config.get_text_config()
    experts = next((n for key in EXPERT_COUNTS if (n := getattr(text, key, None))), 0)
    return Model(path, config.model_type, int(text.num_hidden_layers), int(experts), _parameters_of(module))


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _read_config(path: str) -> Any:
    folder = Path(path).expanduser()
    if path.startswith(("/", "./", "../", "~")) and not folder.is_dir():
        raise ValueError(f"{path}: no such folder; give one that holds a model's config.json, or a name on the Hub")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"{path}: this folder holds no config.json; give the folder of a HF checkpoint")
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")  # else every retry is told
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder) if folder.is_dir() else path)
    except Exception as error:  # transformers' and the Hub's: unknown name, no network, unknown model_type, broken JSON
        remedy = "give a local folder with config.json" if not folder.is_dir() else "is transformers new enough for it?"
        raise ValueError(f"{path}: {first_sentence(error)}; {remedy}") from error


def _build(path: str, config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    errors: list[Exception] = []
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        try:
            with torch.device("meta"):
                return kind.from_config(config, dtype=torch.bfloat16)
        except Exception as error:
            errors.append(error)
    text = f"{path}: no model can be built of this config: {first_sentence(errors[0])}"
    if isinstance(errors[0], ImportError) and errors[0].__cause__ is not None:
        remedy = "mend this environment; in that of make quickstart, put VERL_PLATFORM=cpu in front of the command"
        raise ValueError(f"{text} ({first_sentence(errors[0].__cause__)}); {remedy}") from errors[0]
    raise ValueError(f"{text}; give a causal language model") from errors[0]


def _parameters_of(module: Any) -> tuple[Parameter, ...]:
    wrapped = set(getattr(module, "_no_split_modules", None) or ())
    units = [name for name, child in module.named_modules() if type(child).__name__ in wrapped]
    kept = set(module.state_dict().keys())  # persistent buffers are weights, others are not
    tensors = [*module.named_parameters(), *((name, t) for name, t in module.named_buffers() if name in kept)]
    return tuple(
        Parameter(name, tuple(tensor.shape), tensor.element_size(), _unit_of(name, units)) for name, tensor in tensors
    )


def _unit_of(name: str, units: list[str]) -> str:
    return next((unit for unit in units if name.startswith(f"{unit}.")), "")


def first_sentence(error: BaseException) -> str:
    """The beginning of an error's text, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.partition(". ")[0].rstrip(".")[:200]
