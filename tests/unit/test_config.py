# SPDX-License-Identifier: Apache-2.0
"""``SyncConfig`` and the checks of rollout keys: defaults, refusals that name key, value and remedy."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_sync_plugin.config.settings import KEY_PREFIX, TURN_OFF, SyncConfig, sync_config_of
from verl_sync_plugin.rollouts.sglang.arguments import refuse_keys


def test_defaults() -> None:
    config = SyncConfig.from_mapping(None)
    assert config == SyncConfig() == SyncConfig.from_mapping({})
    assert (config.enabled, config.weights_cpu_backup, config.wire_dtype) == (True, "auto", "auto")
    assert (config.timeout_seconds, config.release_cuda_graph) == (300.0, False)
    assert config.keep_dtype == (r"\.gate\.weight$", r"e_score_correction_bias$")
    assert config.empty_cache == "auto"
    assert (config.copy_plan, config.verify_hashes) == (True, True)


def test_every_key_is_taken_over() -> None:
    values = {
        "enabled": False,
        "weights_cpu_backup": "off",
        "wire_dtype": "float32",
        "keep_dtype": ["a", "b$"],
        "check_finite": False,
        "empty_cache": "always",
        "timeout_seconds": 7,
        "release_cuda_graph": True,
        "copy_plan": False,
        "verify_hashes": False,
        "verify": 7,
        "delivery": "gathered",
    }
    assert SyncConfig.from_mapping(values) == SyncConfig(**{**values, "keep_dtype": ("a", "b$")})  # type: ignore[arg-type]


def test_direct_delivery_needs_the_copy_plan() -> None:
    remedy = rf"{KEY_PREFIX}.delivery='direct'.*copy_plan=False.*Set {KEY_PREFIX}.copy_plan=True"
    with pytest.raises(ValueError, match=remedy):
        SyncConfig.from_mapping({"delivery": "direct", "copy_plan": False})
    SyncConfig.from_mapping({"delivery": "auto", "copy_plan": False})


@pytest.mark.parametrize(
    ("key", "value", "shown", "remedy"),
    [
        ("enabled", "yes", "'yes'", f"Use {KEY_PREFIX}.enabled=True or False."),
        ("enabled", 1, "1", "True or False"),
        ("enabled", None, "None", "True or False"),
        ("release_cuda_graph", "on", "'on'", f"Use {KEY_PREFIX}.release_cuda_graph=True or False."),
        ("copy_plan", "auto", "'auto'", f"Use {KEY_PREFIX}.copy_plan=True or False."),
        ("verify_hashes", 1, "1", f"Use {KEY_PREFIX}.verify_hashes=True or False."),
        (
            "verify",
            "sometimes",
            "'sometimes'",
            "Use one of never, first, always, or a number: 10 for every tenth sync.",
        ),
        ("verify", True, "True", "or a number"),
        ("verify", 0, "0", "or a number"),
        ("verify", 1.5, "1.5", "or a number"),
        ("verify", None, "None", "or a number"),
        ("weights_cpu_backup", "maybe", "'maybe'", "Use one of auto, on, off."),
        ("weights_cpu_backup", 3, "3", "Use one of auto, on, off."),
        ("weights_cpu_backup", None, "None", "Use one of auto, on, off."),
        ("delivery", "in-place", "'in-place'", "Use one of auto, direct, sharded, exchanged, gathered, broadcast."),
        ("empty_cache", "never", "'never'", "Use one of auto, always."),
        ("empty_cache", False, "False", "Use one of auto, always."),
        ("wire_dtype", "bf16", "'bf16'", "Use one of auto, bfloat16, float16, float32."),
        ("wire_dtype", None, "None", "Use one of auto, bfloat16, float16, float32."),
        ("timeout_seconds", 0, "0", "Use for example 300."),
        ("timeout_seconds", -1.5, "-1.5", "Use for example 300."),
        ("timeout_seconds", True, "True", "Use for example 300."),
        ("timeout_seconds", "300", "'300'", "Use for example 300."),
        ("timeout_seconds", float("inf"), "inf", "Use for example 300."),
        ("timeout_seconds", float("nan"), "nan", "Use for example 300."),
        ("timeout_seconds", None, "None", "Use for example 300."),
        ("keep_dtype", "router", "'router'", "not a list of strings"),
        ("keep_dtype", None, "None", "Use for example ["),
        ("keep_dtype", [1], "(1,)", "Use for example ["),
        ("keep_dtype", ["fine", "("], "'('", "Correct the pattern."),
    ],
)
def test_bad_value_names_key_value_and_remedy(key: str, value: Any, shown: str, remedy: str) -> None:
    with pytest.raises(ValueError) as caught:
        SyncConfig.from_mapping({key: value})
    text = str(caught.value)
    assert text.startswith(f"{KEY_PREFIX}.{key}={shown}: ")
    assert remedy in text


@pytest.mark.parametrize(("word", "kept"), [(True, "on"), (False, "off"), ("on", "on"), ("off", "off")])
def test_yaml_reads_on_and_off_as_booleans(word: bool | str, kept: str) -> None:
    assert SyncConfig.from_mapping({"weights_cpu_backup": word}).weights_cpu_backup == kept


def test_unknown_key_suggests_the_nearest() -> None:
    with pytest.raises(ValueError) as caught:
        SyncConfig.from_mapping({"timeout_second": 5})
    assert f"{KEY_PREFIX}.timeout_second=5: unknown key" in str(caught.value)
    assert f"Did you mean {KEY_PREFIX}.timeout_seconds?" in str(caught.value)


def test_unknown_key_far_from_all_lists_the_known() -> None:
    with pytest.raises(ValueError, match="Known keys: enabled, weights_cpu_backup, wire_dtype, keep_dtype"):
        SyncConfig.from_mapping({"zzz": 5})


@pytest.mark.parametrize("wrap", [dict, OmegaConf.create])
def test_config_is_found_in_the_rollout(wrap: Any) -> None:
    rollout = wrap({"custom": {"sync": {"timeout_seconds": 5, "keep_dtype": ["x"]}}})
    assert sync_config_of(rollout) == SyncConfig(timeout_seconds=5, keep_dtype=("x",))


@pytest.mark.parametrize("custom", [None, {}, {"sync": None}, {"sync": {}}, {"other": 1}])
def test_missing_sections_mean_defaults(custom: dict[str, Any] | None) -> None:
    assert sync_config_of({"custom": custom}) == SyncConfig()
    assert sync_config_of({}) == SyncConfig()


@pytest.mark.parametrize(
    ("custom", "text"),
    [
        (5, "rollout.custom=5: not a mapping. Use actor_rollout_ref.rollout.custom.<key>=<value>."),
        ({"sync": 5}, f"{KEY_PREFIX}=5: not a mapping. Use {KEY_PREFIX}.<key>=<value>."),
        ({"sync": ["enabled"]}, f"{KEY_PREFIX}=['enabled']: not a mapping."),
    ],
)
def test_section_that_is_no_mapping(custom: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        sync_config_of({"custom": custom})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("section", "shown"),
    [
        ({"disaggregation": {"enabled": True}}, "rollout.disaggregation.enabled=True"),
        ({"quantization": "fp8"}, "rollout.quantization='fp8'"),
        ({"mtp": {"enable": True, "enable_rollout": True}}, "rollout.mtp.enable_rollout=True"),
    ],
)
def test_unsupported_is_refused_with_the_way_out(section: dict[str, Any], shown: str) -> None:
    with pytest.raises(ValueError) as caught:
        refuse_keys(OmegaConf.create(section), moves=True)
    assert shown in str(caught.value)
    assert TURN_OFF in str(caught.value)


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"disaggregation": None, "quantization": None, "mtp": None},
        {"disaggregation": {"enabled": False}},
        {"mtp": {"enable": True, "enable_rollout": False}},
        {"mtp": {"enable": False, "enable_rollout": True}},
    ],
)
def test_supported_passes(section: dict[str, Any]) -> None:
    refuse_keys(OmegaConf.create(section), moves=True)
