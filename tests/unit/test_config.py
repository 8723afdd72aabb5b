# SPDX-License-Identifier: Apache-2.0
"""``SyncConfig`` and the bucket keys: defaults, and refusals that name key, value and remedy."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_sync_plugin.config.settings import (
    GONE,
    GONE_DELIVERIES,
    KEY_PREFIX,
    LONG_BUCKET_KEY,
    SHORT_BUCKET_KEY,
    SyncConfig,
    check_bucket_megabytes,
    sync_config_of,
)


def test_defaults_and_every_key() -> None:
    assert SyncConfig.from_mapping(None) == SyncConfig() == SyncConfig(True, 300.0, "first", "abort", "auto", None)
    values = {"enabled": False, "timeout_seconds": 7, "verify": 7, "pause": "retract", "delivery": "staged"}
    assert SyncConfig.from_mapping({**values, "max_probs_diff": 1}) == SyncConfig(**values, max_probs_diff=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "values", "remedy"),
    [
        ("enabled", ("yes", 1, None), f"Use {KEY_PREFIX}.enabled=True or False."),
        ("timeout_seconds", (0, -1.5, True, "300", float("inf"), float("nan"), None, 86401), "Use for example 300"),
        ("verify", ("sometimes", True, 0, 1.5, None), "Use one of never, first, always, or a number: 10 for every"),
        ("pause", ("stop", 3, None), "Use one of abort, retract, in_place."),
        ("delivery", ("in-place", None, ["auto"]), "Use one of auto, staged."),
        ("delivery", GONE_DELIVERIES, f"gone; remove it, or use {KEY_PREFIX}.delivery=staged"),
        ("max_probs_diff", (0, 2, True, "much", float("nan")), "Use for example 0.02, or remove it."),
        *((key, (True, "auto", 7), f"gone; remove it: {why}.") for key, why in GONE.items()),
        ("timeout_second", (5,), f"unknown key. Did you mean {KEY_PREFIX}.timeout_seconds?"),
        ("zzz", (5,), "unknown key. Known keys: enabled, timeout_seconds, verify, pause, delivery, max_probs_diff."),
    ],
)
def test_a_bad_key_or_value_names_key_value_and_remedy(key: str, values: tuple[Any, ...], remedy: str) -> None:
    for value in values:
        with pytest.raises(ValueError) as caught:
            SyncConfig.from_mapping({key: value})
        assert str(caught.value).startswith(f"{KEY_PREFIX}.{key}={value!r}: ") and remedy in str(caught.value)


@pytest.mark.parametrize("wrap", [dict, OmegaConf.create])
def test_the_settings_are_found_in_the_rollout(wrap: Any) -> None:
    assert sync_config_of(wrap({"custom": {"sync": {"timeout_seconds": 5}}})) == SyncConfig(timeout_seconds=5)
    for custom in (None, {}, {"sync": None}, {"sync": {}}, {"other": 1}):
        assert sync_config_of(wrap({"custom": custom})) == sync_config_of(wrap({})) == SyncConfig()
    for custom, text in (
        (5, "rollout.custom=5: not a mapping. Use actor_rollout_ref.rollout.custom.<key>=<value>."),
        ({"sync": ["enabled"]}, f"{KEY_PREFIX}=['enabled']: not a mapping. Use {KEY_PREFIX}.<key>=<value>."),
    ):
        with pytest.raises(ValueError) as caught:
            sync_config_of(wrap({"custom": custom}))
        assert text in str(caught.value)


def test_the_size_of_a_bucket() -> None:
    assert [check_bucket_megabytes(*given) for given in ((None, 2048), (512, 512), (1, 1))] == [2048, 512, 1]
    for short, long, key, shown in (
        *((bad, bad, SHORT_BUCKET_KEY, repr(bad)) for bad in (0, -1, True, "512", 0.5, "auto")),
        *((None, bad, LONG_BUCKET_KEY, repr(bad)) for bad in (0, -1, True, "512", 0.5, "auto", None)),
        (512, 1024, SHORT_BUCKET_KEY, f"512 and {LONG_BUCKET_KEY}=1024 are both given and differ. Remove one of them"),
    ):
        with pytest.raises(ValueError) as caught:
            check_bucket_megabytes(short, long)
        text = str(caught.value)
        assert text.startswith(f"{key}={shown}") and (f"{key}=512" in text or "Remove one" in text), text
