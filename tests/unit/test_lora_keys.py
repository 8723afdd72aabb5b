# SPDX-License-Identifier: Apache-2.0
"""Covers LoRA's keys in the driver: both ways to say them, and what cannot be trained, merged or served."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, VeraConfig
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen2Config
from verl.workers.rollout.sglang_rollout.utils import lora_rank_of

from contract.fsdp_models import SIZES, ModelConfig
from contract.sources import open_source
from fresh_process import python
from hydra_run import config_of, refused, rollout_of
from verl_sync_plugin.lora.peft import build_peft_model

MODEL = "actor_rollout_ref.model"
LORA, PEFT = f"{MODEL}.lora", f"{MODEL}.lora.peft"
STRATEGY = "actor_rollout_ref.actor.strategy"
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
    (f"{LORA}.type=vlm_lora", "lora.type='vlm_lora'", "Use lora or dora"),
    (f"{LORA}.dropout_position=post", "dropout_position='post'", "Use 'pre'"),
    (f"{LORA}.a2a_experimental=True", "a2a_experimental=True", "Use False"),
    (f"{LORA}.lora_A_init_method=odd", "lora_A_init_method='odd'", "kaiming or gaussian"),
    (f"{LORA}.target_modules=[linear_qkv]", "Megatron's name", "all-linear"),
    # values of PEFT's, by the types of its LoraConfig
    (f"+{PEFT}.use_rslora='\"false\"'", "peft.use_rslora='\"false\"': PEFT takes bool", "Correct"),
    (f"+{PEFT}.bias=lora", "peft.bias='lora': PEFT takes ", "Did you mean lora_only?"),
    (f"+{PEFT}.rank_pattern={{q_proj: two}}", "peft.rank_pattern={'q_proj': 'two'}: PEFT takes ", "Correct"),
    (f"+{PEFT}.alpha_pattern={{q_proj: nan}}", "peft.alpha_pattern={'q_proj': nan}: PEFT takes ", "Correct"),
    (f"+{PEFT}.modules_to_save=lm_head", "peft.modules_to_save='lm_head': PEFT takes ", "Use [lm_head]"),
    (f"+{PEFT}.init_lora_weights=pisa", "peft.init_lora_weights='pisa': PEFT takes ", "Did you mean pissa?"),
    (f"+{PEFT}.init_lora_weights=pissa_niter_x", "peft.init_lora_weights='pissa_niter_x': ", "Correct"),
    (f"+{PEFT}.init_lora_weights=eva", "peft.init_lora_weights='eva': PEFT needs data for it", "Use"),
    (f"+{PEFT}.init_lora_weights=loftq", "peft={'init_lora_weights': 'loftq'}: PEFT refuses it: ", "scipy"),
    (f"{LORA}.dropout=some", "lora.dropout='some': PEFT takes float", "Correct"),
    (f"{MODEL}.target_modules=5", "model.target_modules=5: PEFT takes ", "Correct"),
    (f"+{PEFT}=[a]", "lora.peft=['a']: not a mapping", f"{PEFT}.<key>="),
    (f"+{PEFT}.layers_pattern=['(']", "peft.layers_pattern=['(']: not a regular expression", "Correct"),
    *((f"{key}='('", f"{key}='(': not a regular expression", "Correct the pattern") for key in (
        f"{MODEL}.target_modules", f"{LORA}.target_modules", f"{MODEL}.exclude_modules")),
    # keys
    (f"+{LORA}.rnk=8", "lora.rnk=8: unknown key", f"Did you mean {LORA}.rank?"),
    (f"+{LORA}.pefft.use_dora=True", "lora.pefft={'use_dora': True}: unknown key", f"Did you mean {PEFT}?"),
    (f"+{LORA}.use_rslora=True", "lora.use_rslora=True: nothing reads it there", f"Use {PEFT}.use_rslora."),
    (f"+{LORA}.r=8", "lora.r=8: nothing reads it there", f"Use {LORA}.rank."),
    (f"+{PEFT}.use_dra=True", "peft.use_dra=True", "Did you mean use_dora"),
    (f"+{PEFT}.r=4", "peft.r=4: has a key of its own", "model.lora.rank"),
    (f"+{PEFT}.layer_replication=[[0,2],[0,2]]", "has layer_replication=", "without layer_replication"),
    # both ways to say it
    (f"{MODEL}.lora_rank=4", f"{LORA}.rank=8 and {MODEL}.lora_rank=4 are both given and differ", "Remove one"),
    ((f"{LORA}.alpha=5", f"{MODEL}.lora_alpha=4"), f"lora.alpha=5 and {MODEL}.lora_alpha=4", "Remove one"),
    # adapters that are loaded
    ((f"{LORA}.rank=0", f"{MODEL}.lora_adapter_path=/a"), "lora_adapter_path='/a': no LoRA rank", "lora_rank"),
    ((f"{LORA}.type=dora", f"{LORA}.adapter_path=/a"), "brings its own settings", "Remove one"),
    (f"{MODEL}.lora_adapter_path=/nope", "lora_adapter_path='/nope': there is no such folder", "Give the"),
    (f"{LORA}.adapter_path=./nope", "lora_adapter_path='./nope': there is no such folder", "Give the"),
    # what stock verl would not read: it would train all parameters
    *((off, f"{LORA}.rank=8 with custom.sync.enabled=False", f"{MODEL}.lora_rank=8 {MODEL}.lora_alpha=32") for off in (
        "actor_rollout_ref.rollout.custom.sync.enabled=False", "+sync=stock")),
]  # fmt: skip


@pytest.mark.parametrize(("given", "shown", "remedy"), REFUSED, ids=[shown for _, shown, _ in REFUSED])
def test_refused(given: str | tuple[str, ...], shown: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, scipy=False)
    text = refused(*adapted(*((given,) if isinstance(given, str) else given)))
    assert shown in text and remedy in text.partition(shown)[2], text


PASSES = [
    *(f"+{PEFT}.{each}" for each in (
        "init_lora_weights=pissa_niter_4", "init_lora_weights=False", "bias=lora_only", "rank_pattern={q_proj: 2}",
        "alpha_pattern={q_proj: 2.5}")),
    f"{LORA}.dropout=0", f"{LORA}.alpha=32.0", f"{MODEL}.target_modules='.*(q|v)_proj'",
    f"{MODEL}.lora_adapter_path=somebody/adapter",  # on a hub
    f"{MODEL}.lora_adapter_path=/on/another/machine",
    f"+{LORA}.fully_sharded_loras=True",  # verl reads it for vLLM
]  # fmt: skip
SERVED = [
    *((f"{MODEL}.target_modules={each}",) for each in ("[q_proj,v_proj]", "[gate_proj]", "[o_proj]", "all-linear")),
    (f"{LORA}.dropout=0.1", f"+{PEFT}.bias=none"),
    (f"{LORA}.rank=0", f"+{PEFT}.use_rslora=True"),
]


def test_what_is_right_or_somebody_elses_passes() -> None:
    for given, merge in (*(((each,), True) for each in PASSES), *((each, False) for each in SERVED)):
        assert rollout_of(*adapted(*given, merge=merge)).custom.sync.enabled is True, given


def settled(*overrides: str, strategy: str = "fsdp2") -> DictConfig:
    """The model config as the driver leaves it."""
    model: DictConfig = config_of(f"{STRATEGY}={strategy}", f"{LORA}.merge=True", *overrides).actor_rollout_ref.model
    return model


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), (0, 16, "all-linear", None, None)),
        (("_rank=8",), (8, 16, "all-linear", None, None)),
        ((".rank=8", "_rank=8"), (8, 32, "all-linear", None, None)),
        ((".rank=8", "_alpha=5"), (8, 5, "all-linear", None, None)),
        ((".rank=8", ".alpha=64", ".target_modules=[q]", ".exclude_modules=[v]"), (8, 64, ["q"], ["v"], None)),
        ((".rank=8", ".adapter_path=/on/a/worker"), (8, 32, "all-linear", None, "/on/a/worker")),
    ],
)
def test_either_way_gives_the_flat_keys(given: tuple[str, ...], expected: tuple[Any, ...], strategy: str) -> None:
    model = settled(*(f"{LORA}{each}" for each in given), strategy=strategy)
    assert tuple(model[key] for key in FLAT) == expected


def test_without_lora_peft_is_not_imported(tmp_path: Path) -> None:
    code = "import sys, hydra_run; hydra_run.config_of(); print('peft' in sys.modules)"
    assert python(tmp_path, code).stdout.splitlines()[-1] == "False"


def model_of(settled: DictConfig, tied: bool) -> ModelConfig:
    """The fields of verl's ``HFModelConfig`` that concern LoRA."""
    given = {"lora": settled.lora, "target_parameters": settled.get("target_parameters"), "use_shm": False}
    given |= {key: settled[key] for key in FLAT}
    return ModelConfig(hf_config=Qwen2Config(tie_word_embeddings=tied, **SIZES), **given)


def test_what_pefts_config_knows_reaches_the_model() -> None:
    model = model_of(
        settled(
            f"{LORA}.rank=3", f"{LORA}.alpha=7", f"{LORA}.type=dora", f"{LORA}.dropout=0.25",
            f"{LORA}.target_modules=[q_proj,v_proj]", f"+{PEFT}.use_rslora=True",
            f"+{PEFT}.rank_pattern={{v_proj: 2}}", f"+{PEFT}.modules_to_save=[lm_head]",
            f"{LORA}.lora_A_init_method=gaussian",
        ),
        tied=False,
    )  # fmt: skip
    assert lora_rank_of(model) == 3
    built = build_peft_model(AutoModelForCausalLM.from_config(model.hf_config, dtype=torch.bfloat16), model)
    assert isinstance(built, PeftModel)
    config: Any = built.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_dora, config.use_rslora) == (3, 7, True, True)
    assert config.rank_pattern == {"v_proj": 2} and config.lora_dropout == 0.25
    assert config.init_lora_weights == "gaussian" and config.modules_to_save == ["lm_head"]
    trained = {name: parameter.dtype for name, parameter in built.named_parameters() if parameter.requires_grad}
    assert {*trained.values()} == {torch.bfloat16}
    assert "lora_magnitude_vector" in str(trained) and "lm_head" in str(trained)
    assert "k_proj" not in str(trained) and "mlp" not in str(trained)


@pytest.mark.parametrize(
    ("given", "unties"),
    [
        *(((f"{LORA}.target_modules={each}",), True) for each in ("[embed_tokens,q_proj]", "[lm_head]", "'.*tokens'")),
        ((f"+{PEFT}.modules_to_save=[lm_head]",), True),
        ((f"+{PEFT}.modules_to_save=[embed_tokens]", f"+{PEFT}.ensure_weight_tying=True"), False),
        ((f"{LORA}.target_modules=[embed_tokens,q_proj]", f"{LORA}.exclude_modules=[embed_tokens]"), False),
        ((f"{LORA}.target_modules=[q_proj]",), False),
        ((f"{LORA}.rank=0",), False),
    ],
)
def test_the_head_travels_where_the_adapter_makes_it_different(given: tuple[str, ...], unties: bool) -> None:
    """The engine unties it then, too."""
    for tied in (True, False):
        model = model_of(settled(*adapted(*given)), tied)
        module = AutoModelForCausalLM.from_config(model.hf_config)
        module = build_peft_model(module, model) if model.lora_rank else module
        source = open_source("fsdp2", SimpleNamespace(module=module, model_config=model))
        sent = {view.name for shard in source.shards() for view in shard.base.views}
        assert ("lm_head.weight" in sent) is (unties or not tied)


UNSERVABLE = (
    "use_rslora=True", "use_dora=True", "rank_pattern={'v_proj': 2}", "alpha_pattern={'v_proj': 2}",
    "modules_to_save=['lm_head']", "bias='all'", "lora_bias=True", "fan_in_fan_out=True",
)  # fmt: skip
CANNOT = "SGLang cannot serve an adapter with "
MISREAD = [
    *((f"+{PEFT}.{each}".replace("'", ""), f"{CANNOT}{PEFT}.{each}.") for each in UNSERVABLE),
    (f"{LORA}.type=dora", f"{CANNOT}{LORA}.type='dora'."),
    (f"+{MODEL}.target_parameters=['a.weight']", f"{CANNOT}{MODEL}.target_parameters=['a.weight']."),
    (f"{MODEL}.target_modules=[k_proj,v_proj]", "q_proj, k_proj, v_proj in one, and needs factors of q_proj, too"),
    (f"{LORA}.target_modules=[q_proj,k_proj]", "needs factors of v_proj, too"),
    (f"{LORA}.target_modules=[up_proj,down_proj]", "gate_proj, up_proj in one, and needs factors of gate_proj, too"),
    (f"{MODEL}.target_modules='.*q_proj'", "SGLang takes no pattern"),
]


@pytest.mark.parametrize(("given", "said"), MISREAD)
def test_what_sglang_would_misread_is_refused_and_merged_it_is_served(given: str, said: str) -> None:
    text = refused(*adapted(given, merge=False))
    assert "lora.merge=False" in text and said in text and f"et {LORA}.merge=True" in text.partition(said)[2], text
    rollout_of(*adapted(given))


@pytest.mark.parametrize(
    ("saved", "targets", "says"),
    [
        ({"r": 9}, "all-linear", f"{MODEL}.lora_rank=8 with WHERE, which has r=9. Set {MODEL}.lora_rank=9"),
        ({"use_rslora": True}, "all-linear", "WHERE, which has use_rslora=True"),
        ({"target_modules": ["k_proj", "v_proj"]}, "all-linear", "needs factors of q_proj, too"),
        (
            {"target_modules": ["q_proj", "v_proj", "o_proj"]}, "[q_proj,v_proj]",
            f"{MODEL}.target_modules=['q_proj', 'v_proj'] with WHERE, which adapts o_proj",
        ),
        ({"r": 4}, "all-linear", ""),
        ({"target_modules": ".*_proj"}, "all-linear", ""),
    ],
)  # fmt: skip
def test_an_existing_adapter_to_serve(saved: dict[str, Any], targets: str, says: str, tmp_path: Path) -> None:
    LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **saved}).save_pretrained(tmp_path)
    given = f"{MODEL}.lora_adapter_path={tmp_path}", f"{MODEL}.target_modules={targets}"
    if says:
        text = refused(*adapted(*given, merge=False))
        assert says.replace("WHERE", f"{MODEL}.lora_adapter_path='{tmp_path}'") in text
    rollout_of(*adapted(*given, merge=bool(says)))


def test_what_of_an_adapters_folder_is_refused(tmp_path: Path) -> None:
    path = f"{MODEL}.lora_adapter_path={tmp_path}"
    assert "it holds no adapter_config.json" in refused(*adapted(path))
    for kind in (IA3Config, VeraConfig, PromptTuningConfig):
        kind(task_type="CAUSAL_LM").save_pretrained(tmp_path)
        for key, strategy, merge in (("lora_adapter_path", "fsdp", True), ("lora.adapter_path", "fsdp2", False)):
            text = refused(*adapted(f"{MODEL}.{key}={tmp_path}", merge=merge, strategy=strategy))
            assert f"{MODEL}.lora_adapter_path='{tmp_path}' has peft_type={kind().peft_type.value}" in text
            assert "Give a LoRA adapter" in text
    LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 2), (1, 2)]).save_pretrained(tmp_path)
    text = refused(*adapted(path))
    assert f"'{tmp_path}' has layer_replication=[[0, 2], [1, 2]]" in text and "without layer_replication" in text
    (tmp_path / "adapter_config.json").write_text("{")
    rollout_of(*adapted(path))


# An adapted embedding or head: of which model, tied or not, what is refused, and by which strategies
BOTH, LLAMA, GEMMA = ("fsdp", "fsdp2"), "LlamaForCausalLM", "Gemma2ForCausalLM"
ALWAYS_TIED = (
    *(f"{each}ForCausalLM" for each in ("Cohere", "Cohere2", "Gemma", "Gemma2", "Gemma3", "Gemma3n", "GPTBigCode")),
    *(f"Gemma{each}ForConditionalGeneration" for each in ("3", "3n", "4")), "GPT2LMHeadModel",
)  # fmt: skip
EMBEDDING, HEAD = f"{MODEL}.target_modules=[o_proj,embed_tokens]", f"{MODEL}.target_modules=[lm_head]"
SAVED_HEAD, SAVED = (f"+{PEFT}.modules_to_save=[{each}]" for each in ("lm_head", "embed_tokens"))
TIED_FACTORS, UNTIE = f"+{PEFT}.ensure_weight_tying=True", f"+{MODEL}.override_config.tie_word_embeddings=False"
BY_TORCH = (
    f"{STRATEGY}=fsdp2: verl shards embedding and head by themselves",
    f"Set {STRATEGY}=fsdp with actor_rollout_ref.actor.fsdp_config.use_orig_params=True",
)
ENDS: list[tuple[str, bool, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = [
    *((each, True, (EMBEDDING,), BOTH, (f"{MODEL}.target_modules=['o_proj', 'embed_tokens']", f"SGLang's {each} ",
                                        f"{MODEL}.exclude_modules")) for each in ALWAYS_TIED),
    *((GEMMA, tied, (given,), BOTH, (said, f"SGLang's {GEMMA} ")) for tied in (True, False) for given, said in (
        (HEAD, f"{MODEL}.target_modules=['lm_head']"), (SAVED_HEAD, f"{PEFT}.modules_to_save=['lm_head']"),
        (f"{MODEL}.lora_adapter_path=FOLDER", f"{MODEL}.lora_adapter_path='FOLDER': it changes the emb"))),
    *((GEMMA, True, given, (), ()) for given in (  # what leaves it tied
        (), (EMBEDDING, f"{MODEL}.exclude_modules=[embed_tokens]"), (SAVED, TIED_FACTORS))),
    # FSDP2 with an end that is not tied
    *((LLAMA, tied, (given, *more), refusing, BY_TORCH) for given in (EMBEDDING, HEAD, SAVED)
      for tied, more, refusing in ((False, (), BOTH[1:]), (True, (), ()), (True, (UNTIE,), BOTH[1:]))),
    (LLAMA, False, (SAVED_HEAD,), (), ()),
    (LLAMA, True, (EMBEDDING, TIED_FACTORS), BOTH[1:], ("Leave ensure_weight_tying out",)),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "tied", "given", "refusing", "said"), ENDS)
def test_an_adapted_end(
    architecture: str, tied: bool, given: tuple[str, ...], refusing: tuple[str, ...], said: tuple[str, ...],
    tmp_path: Path,
) -> None:  # fmt: skip
    config = Gemma2Config if architecture == GEMMA else LlamaConfig
    config(**SIZES, architectures=[architecture], tie_word_embeddings=tied).save_pretrained(tmp_path)
    LoraConfig(target_modules=["embed_tokens"]).save_pretrained(tmp_path)
    given = (f"{MODEL}.path={tmp_path}", *(each.replace("FOLDER", str(tmp_path)) for each in given))
    for strategy in BOTH:
        if strategy in refusing:
            text = refused(*adapted(*given, strategy=strategy))
            assert all(each.replace("FOLDER", str(tmp_path)) in text for each in said), text
        else:
            rollout_of(*adapted(*given, strategy=strategy))


def test_an_adapted_end_that_is_served_or_of_a_model_on_a_hub(tmp_path: Path) -> None:
    LlamaConfig(**SIZES, architectures=[LLAMA], tie_word_embeddings=False).save_pretrained(tmp_path)
    given = (f"{MODEL}.path={tmp_path}", EMBEDDING)
    assert BY_TORCH[0] in refused(*adapted(*given, merge=False))
    rollout_of(*adapted(*given, merge=False, strategy="fsdp"))
    rollout_of(*adapted(f"{MODEL}.path=somebody/on-a-hub", HEAD))


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


def test_compositions_that_are_shipped_fit_megatron() -> None:
    stock: Any = config_of("+sync=stock", name="ppo_megatron_trainer").actor_rollout_ref.actor.megatron
    for composition in ("colocated", "colocated_resident", "colocated_tight_memory_megatron"):
        config = config_of(f"+sync={composition}", name="ppo_megatron_trainer").actor_rollout_ref
        assert config.actor.megatron.keys() == stock.keys(), "verl has no such key"
        assert config.actor.megatron.param_offload is ("tight_memory" in composition)
        assert config.rollout.free_cache_engine is (composition != "colocated_resident")
