# SPDX-License-Identifier: Apache-2.0
"""Covers LoRA's keys in the driver: both ways to say them, and what cannot be trained, merged or served."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from peft import IA3Config, LoraConfig, PromptTuningConfig, VeraConfig

from fresh_process import said
from hydra_run import config_of, refused, rollout_of

MODEL = "actor_rollout_ref.model"
LORA = f"{MODEL}.lora"
STRATEGY, MEGATRON = "actor_rollout_ref.actor.strategy", "actor_rollout_ref.actor.megatron"
FLAT = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")


def adapted(*overrides: str, merge: bool = True, strategy: str = "fsdp2") -> list[str]:
    """Overrides of a run with LoRA; rank and merge are as given, if they are."""
    keys = {f"{LORA}.rank": 8, f"{LORA}.merge": merge, STRATEGY: strategy}
    given = {each.lstrip("+").partition("=")[0] for each in overrides}
    return [*(f"{key}={value}" for key, value in keys.items() if not {key, LORA} & given), *overrides]


def install(monkeypatch: pytest.MonkeyPatch, **packages: bool) -> None:
    """Has packages be installed, or not, for who looks."""
    find, named = importlib.util.find_spec, {name.replace("_", "."): there for name, there in packages.items()}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: (named[name] or None) if name in named else find(name, *rest)
    )


REFUSED: list[tuple[str | tuple[str, ...], str, str]] = [
    # values
    *((f"{LORA}.rank={bad}", f"lora.rank={said}: not a whole number", "for example") for bad, said in (
        ("2.5", "2.5"), ("-1", "-1"), ("many", "'many'"), ("null", "None"))),
    (f"{MODEL}.lora_rank=null", "lora_rank=None: not a whole number", "for example"),
    (f"{LORA}.alpha=big", "lora.alpha='big': not a number", "for example"),
    *((f"{MODEL}.lora_alpha={bad}", f"lora_alpha={bad}: not a number", "for example") for bad in ("nan", "inf")),
    (f"{LORA}.merge=no", "lora.merge='no': not a boolean", "True or False"),
    (LORA + "=5", "lora=5: not a mapping", "lora.<key>="),
    *((f"{LORA}.{each}", f"lora.{key}={said}: an FSDP trainer takes only rank, ", "Remove it") for each, key, said in (
        ("type=dora", "type", "'dora'"), ("dropout=0.1", "dropout", "0.1"),
        ("lora_A_init_method=gaussian", "lora_A_init_method", "'gaussian'"))),
    *((f"+{LORA}.{each}", f"lora.{key}={said}: an FSDP trainer takes only rank, ", "Remove it") for each, key, said in (
        ("use_rslora=True", "use_rslora", "True"), ("r=8", "r", "8"),
        ("peft.modules_to_save=[lm_head]", "peft", "{'modules_to_save': ['lm_head']}"))),
    (f"{LORA}.target_modules=[linear_qkv]", "Megatron's name", "all-linear"),
    # keys
    (f"+{LORA}.rnk=8", "lora.rnk=8: unknown key", f"Did you mean {LORA}.rank?"),
    # both ways to say it
    (f"{MODEL}.lora_rank=4", f"{LORA}.rank=8 and {MODEL}.lora_rank=4 are both given and differ", "Remove one"),
    ((f"{LORA}.alpha=5", f"{MODEL}.lora_alpha=4"), f"lora.alpha=5 and {MODEL}.lora_alpha=4", "Remove one"),
    # adapters that are loaded
    ((f"{LORA}.rank=0", f"{MODEL}.lora_adapter_path=/a"), "lora_adapter_path='/a': no LoRA rank", "lora_rank"),
    # what stock verl would not read: it would train all parameters
    *((off, f"{LORA}.rank=8 with custom.sync.enabled=False", f"{MODEL}.lora_rank=8 {MODEL}.lora_alpha=32") for off in (
        "actor_rollout_ref.rollout.custom.sync.enabled=False", "+sync=stock")),
]  # fmt: skip


@pytest.mark.parametrize(("given", "shown", "remedy"), REFUSED, ids=[shown for _, shown, _ in REFUSED])
def test_refused(given: str | tuple[str, ...], shown: str, remedy: str) -> None:
    text = refused(*adapted(*((given,) if isinstance(given, str) else given)))
    assert shown in text and remedy in text.partition(shown)[2], text


PASSES = [
    f"{LORA}.dropout=0", f"{LORA}.alpha=32.0", f"{MODEL}.target_modules='.*(q|v)_proj'",
    f"{MODEL}.lora_adapter_path=somebody/adapter",  # on a hub
    f"{MODEL}.lora_adapter_path=/on/another/machine",
    f"+{LORA}.fully_sharded_loras=True",  # verl reads it for vLLM
]  # fmt: skip
SERVED = [
    *((f"{MODEL}.target_modules={each}",) for each in ("[q_proj,v_proj]", "[gate_proj]", "[o_proj]", "all-linear")),
    (f"{LORA}.rank=0", f"{LORA}.type=dora"),
]


def test_what_is_right_or_somebody_elses_passes() -> None:
    for given, merge in (*(((each,), True) for each in PASSES), *((each, False) for each in SERVED)):
        assert rollout_of(*adapted(*given, merge=merge)).custom.sync.enabled is True, given


def settled(*overrides: str, strategy: str = "fsdp2") -> DictConfig:
    """The model config as the driver leaves it."""
    model: DictConfig = config_of(f"{STRATEGY}={strategy}", f"{LORA}.merge=True", *overrides).actor_rollout_ref.model
    return model


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@pytest.mark.parametrize(("given", "expected"), [
    ((), (0, 16, "all-linear", None, None)),
    (("_rank=8",), (8, 16, "all-linear", None, None)),
    ((".rank=8", "_rank=8"), (8, 16, "all-linear", None, None)),
    ((".rank=8", "_alpha=5"), (8, 5, "all-linear", None, None)),
    ((".rank=8", ".alpha=64", ".target_modules=[q]", ".exclude_modules=[v]"), (8, 64, ["q"], ["v"], None)),
    ((".rank=8", ".adapter_path=/on/a/worker"), (8, 32, "all-linear", None, "/on/a/worker")),
    # as stock verl, which reads nothing else of the block then
    (("_rank=8", ".alpha=64", ".dropout=0.1", ".target_modules=[linear_qkv]"), (8, 16, "all-linear", None, None)),
])  # fmt: skip
def test_either_way_gives_the_flat_keys(given: tuple[str, ...], expected: tuple[Any, ...], strategy: str) -> None:
    model = settled(*(f"{LORA}{each}" for each in given), strategy=strategy)
    assert tuple(model[key] for key in FLAT) == expected
    for rank in (".rank=8", "_rank=8"):  # adapts parameters by name alone, or what PEFT knows of the model
        assert settled(f"{LORA}{rank}", f"{MODEL}.target_modules=null", strategy=strategy).target_modules is None


def test_without_lora_peft_is_not_imported(tmp_path: Path) -> None:
    code = "import sys, hydra_run; hydra_run.config_of(); print('peft' in sys.modules)"
    assert said(tmp_path, code).splitlines()[-1] == "False"


CANNOT = "SGLang cannot serve an adapter with "
MISREAD = [
    (f"+{MODEL}.target_parameters=['a.weight']", f"{CANNOT}{MODEL}.target_parameters=['a.weight']."),
    (f"{MODEL}.target_modules=[k_proj,v_proj]", "q_proj, k_proj, v_proj in one, and needs factors of q_proj, too"),
    (f"{LORA}.target_modules=[q_proj,k_proj]", "needs factors of v_proj, too"),
    (f"{LORA}.target_modules=[up_proj,down_proj]", "gate_proj, up_proj in one, and needs factors of gate_proj, too"),
    *((f"{MODEL}.target_modules={each}", "SGLang takes names of modules only") for each in ("'.*q_proj'", "null")),
]


@pytest.mark.parametrize(("given", "said"), MISREAD)
def test_what_sglang_would_misread_is_refused_and_merged_it_is_served(given: str, said: str) -> None:
    text = refused(*adapted(given, merge=False))
    assert "lora.merge=False" in text and said in text and f"et {LORA}.merge=True" in text.partition(said)[2], text
    rollout_of(*adapted(given))


UNSERVABLE: dict[str, Any] = {
    "use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 2}, "bias": "all",
    "fan_in_fan_out": True,
}  # fmt: skip


@pytest.mark.parametrize(("saved", "targets", "says"), [
    ({"r": 9}, "all-linear", f"{MODEL}.lora_rank=8 with WHERE, which has r=9. Set {MODEL}.lora_rank=9"),
    *(({key: value}, "all-linear", f"WHERE, which has {key}={value!r}") for key, value in UNSERVABLE.items()),
    ({"target_modules": ["k_proj", "v_proj"]}, "all-linear", "needs factors of q_proj, too"),
    ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "[q_proj,v_proj]",
     f"{MODEL}.target_modules=['q_proj', 'v_proj'] with WHERE, which adapts o_proj"),
    *((passes, "all-linear", "") for passes in ({"r": 4}, {"target_modules": ".*_proj"})),
])  # fmt: skip
def test_an_existing_adapter_to_serve(saved: dict[str, Any], targets: str, says: str, tmp_path: Path) -> None:
    LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **saved}).save_pretrained(tmp_path)
    given = f"{MODEL}.lora_adapter_path={tmp_path}", f"{MODEL}.target_modules={targets}"
    if says:
        text = refused(*adapted(*given, merge=False))
        assert says.replace("WHERE", f"{MODEL}.lora_adapter_path='{tmp_path}'") in text
    rollout_of(*adapted(*given, merge=bool(says)))


MORE: dict[str, Any] = {
    "layer_replication": [[0, 2], [1, 2]], "use_dora": True, "lora_bias": True, "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1],
}  # fmt: skip


def test_what_of_an_adapters_folder_is_refused(tmp_path: Path) -> None:
    path = f"{MODEL}.lora_adapter_path={tmp_path}"
    for kind in (IA3Config, VeraConfig, PromptTuningConfig):
        kind(task_type="CAUSAL_LM").save_pretrained(tmp_path)
        for key, strategy, merge in (("lora_adapter_path", "fsdp", True), ("lora.adapter_path", "fsdp2", False)):
            text = refused(*adapted(f"{MODEL}.{key}={tmp_path}", merge=merge, strategy=strategy))
            assert f"{MODEL}.lora_adapter_path='{tmp_path}' has peft_type={kind().peft_type.value}" in text
            assert f"Merge the adapter into the checkpoint of {MODEL}.path" in text
    for field, value in MORE.items():
        LoraConfig(target_modules=["q_proj"], **{field: value}).save_pretrained(tmp_path)
        text = refused(*adapted(path))
        assert f"'{tmp_path}' has {field}={value}" in text and "Merge the adapter into the checkpoint" in text
    (tmp_path / "adapter_config.json").write_text("{")
    rollout_of(*adapted(path))


# An adapted embedding or head: of a model that ties them (or does not say), what is refused where it is merged
EMBEDDING, HEAD = f"{MODEL}.target_modules=[o_proj,embed_tokens]", f"{MODEL}.target_modules=[lm_head]"
UNTIE = f"+{MODEL}.override_config.tie_word_embeddings=False"
FSDP1 = f"set {STRATEGY}=fsdp and actor_rollout_ref.actor.fsdp_config.use_orig_params=True"
BY_VERL = (f"which verl cannot shard with {STRATEGY}=fsdp2", FSDP1)
ENDS: list[tuple[bool | None, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = [
    *((True, (given,), ("fsdp", "fsdp2"), (said, "are tied", f"{MODEL}.exclude_modules")) for given, said in (
        (EMBEDDING, f"{MODEL}.target_modules=['o_proj', 'embed_tokens'] adapts model.embed_tokens"),
        (HEAD, f"{MODEL}.target_modules=['lm_head'] adapts lm_head"),
        (f"{MODEL}.target_modules='.*tokens'", "adapts model.embed_tokens"),
        (f"{MODEL}.lora_adapter_path=FOLDER", f"{MODEL}.lora_adapter_path='FOLDER' adapts model.embed_tokens"))),
    *((tied, given, ("fsdp2",), BY_VERL) for given in (EMBEDDING, HEAD) for tied, given in (
        (False, (given,)), (True, (given, UNTIE)))),
    (True, (EMBEDDING, f"{MODEL}.exclude_modules=[embed_tokens]"), (), ()), (True, (), (), ()), (None, (HEAD,), (), ()),
]  # fmt: skip


@pytest.mark.parametrize(("tied", "given", "refusing", "said"), ENDS)
def test_an_adapted_end(
    tied: bool | None, given: tuple[str, ...], refusing: tuple[str, ...], said: tuple[str, ...], tmp_path: Path
) -> None:
    config = {"architectures": ["LlamaForCausalLM"]} | ({} if tied is None else {"tie_word_embeddings": tied})
    (tmp_path / "config.json").write_text(json.dumps(config))
    LoraConfig(target_modules=["embed_tokens"]).save_pretrained(tmp_path)
    given = (f"{MODEL}.path={tmp_path}", *(each.replace("FOLDER", str(tmp_path)) for each in given))
    for strategy in ("fsdp", "fsdp2"):
        if strategy in refusing:
            text = refused(*adapted(*given, strategy=strategy))
            assert all(each.replace("FOLDER", str(tmp_path)) in text for each in said), text
        else:
            rollout_of(*adapted(*given, strategy=strategy))
        if tied and given[-1] == EMBEDDING:
            rollout_of(*adapted(*given, merge=False, strategy=strategy))


@pytest.mark.parametrize("merge", [True, False])
def test_lora_on_megatron_needs_the_bridge_and_no_dora(merge: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("model_engine=megatron", f"++{LORA}.rank=8", f"++{LORA}.merge={merge}")
    install(monkeypatch, megatron_bridge=False)
    text = refused(*given)
    assert f"LoRA rank 8 with {STRATEGY}=megatron: the package megatron.bridge" in text and "is not installed" in text
    install(monkeypatch, megatron_bridge=True)
    assert rollout_of(*given).custom.sync.enabled is True
    text = refused(*given, f"++{LORA}.type=dora")
    assert f"lora.type='dora' with {STRATEGY}=megatron: " in text and f"Set {LORA}.type=lora" in text
    text = refused(given[0], given[2], f"{MODEL}.lora_rank=8")
    assert f"{MODEL}.lora_rank=8 with {STRATEGY}=megatron: " in text and f"Set {LORA}.rank=8 instead" in text


def test_compositions_that_are_shipped_fit_megatron() -> None:
    stock: Any = config_of("+sync=stock", name="ppo_megatron_trainer").actor_rollout_ref.actor.megatron
    for composition in ("colocated", "colocated_resident", "colocated_tight_memory_megatron"):
        config = config_of(f"+sync={composition}", name="ppo_megatron_trainer").actor_rollout_ref
        assert config.actor.megatron.keys() == stock.keys(), "verl has no such key"
        assert config.actor.megatron.param_offload is ("tight_memory" in composition)
        assert config.rollout.free_cache_engine is (composition != "colocated_resident")
