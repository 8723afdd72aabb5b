# SPDX-License-Identifier: Apache-2.0
"""The size of a bucket: the checks of its keys, and ``auto`` from measured memory."""

from __future__ import annotations

from typing import Any

import pytest

from verl_sync_plugin.config.bucket_size import (
    LEAST_MEGABYTES,
    LONG_BUCKET_KEY,
    MOST_MEGABYTES,
    SHORT_BUCKET_KEY,
    STAGING_BUCKETS,
    AutoBucket,
    auto_megabytes,
    check_bucket_megabytes,
)
from verl_sync_plugin.sync.sender import SLOTS, slot_limit

GIB = 1 << 30


@pytest.mark.parametrize(("short", "long", "megabytes"), [(None, 2048, 2048), (512, 512, 512), (1, 1, 1)])
def test_bucket_size(short: int | None, long: int, megabytes: int) -> None:
    assert check_bucket_megabytes(short, long) == megabytes


def test_different_bucket_sizes_are_refused() -> None:
    with pytest.raises(ValueError) as caught:
        check_bucket_megabytes(512, 1024)
    text = str(caught.value)
    assert f"{SHORT_BUCKET_KEY}=512" in text and f"{LONG_BUCKET_KEY}=1024" in text
    assert "Remove one of them" in text


@pytest.mark.parametrize("bad", [0, -1, True, "512", 0.5])
def test_bad_bucket_size_names_its_key(bad: Any) -> None:
    for short, long, key in ((bad, bad, SHORT_BUCKET_KEY), (None, bad, LONG_BUCKET_KEY)):
        with pytest.raises(ValueError) as caught:
            check_bucket_megabytes(short, long)
        assert str(caught.value).startswith(f"{key}={bad!r}: ")
        assert f"Use for example {key}=512" in str(caught.value)


def test_missing_long_bucket_key_is_refused() -> None:
    with pytest.raises(ValueError, match="not a whole number of MiB"):
        check_bucket_megabytes(None, None)


def test_auto_is_a_size_of_its_own() -> None:
    assert check_bucket_megabytes("auto", 512) is None, "512 is what the long key holds then"


def test_auto_beside_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="both given and differ") as caught:
        check_bucket_megabytes("auto", 1024)
    assert f"{SHORT_BUCKET_KEY}=auto" in str(caught.value) and f"{LONG_BUCKET_KEY}=1024" in str(caught.value)


@pytest.mark.parametrize("short", [None, "auto", 512])
def test_auto_on_the_long_key_names_the_short_one(short: Any) -> None:
    with pytest.raises(ValueError) as caught:
        check_bucket_megabytes(short, "auto")
    assert str(caught.value).startswith(f"{LONG_BUCKET_KEY}=auto: ")
    assert f"Use {SHORT_BUCKET_KEY}=auto." in str(caught.value)


@pytest.mark.parametrize(
    ("spare", "megabytes"),
    [
        (-5, 64),
        (0, 64),
        (1 * GIB, 64),
        (2 * GIB - 1, 64),
        (2 * GIB, 128),
        (8 * GIB - 1, 256),
        (8 * GIB, 512),
        (20 * GIB, 1024),
        (32 * GIB, 2048),
        (141 * GIB, 2048),
    ],
)
def test_auto_takes_a_power_of_two(spare: int, megabytes: int) -> None:
    assert auto_megabytes(spare) == megabytes


@pytest.mark.parametrize("spare", [1 * GIB, 3 * GIB + 17, 11 * GIB, 32 * GIB, 100 * GIB])
def test_staging_memory_stays_within_an_eighth(spare: int) -> None:
    """What is allocated is the slots; both bounds in megabytes are the only exceptions."""
    megabytes = auto_megabytes(spare)
    taken = SLOTS * slot_limit(megabytes << 20)
    assert taken <= spare / 8
    assert megabytes == MOST_MEGABYTES or 2 * megabytes * STAGING_BUCKETS << 20 > spare / 8, "it takes what it may"


class Device:
    """80 GiB, of which the trainer holds 20 while the engine sleeps."""

    def __init__(self) -> None:
        self.free = 60 * GIB
        self.readings = 0

    def read(self) -> tuple[int, int]:
        self.readings += 1
        return self.free, 80 * GIB


def test_spare_leaves_out_the_kv_cache_to_come() -> None:
    device = Device()
    auto = AutoBucket(0.6, device.read)
    auto.before_resume()
    device.free -= 16 * GIB  # the weights
    assert auto.spare(resumed=True) == 44 * GIB - (48 - 16) * GIB, "48 GiB is what the engine takes in all"
    assert device.readings == 2


def test_spare_of_an_engine_that_is_awake() -> None:
    device = Device()
    auto = AutoBucket(0.6, device.read)
    auto.before_resume()
    assert auto.spare(resumed=False) == 60 * GIB, "its KV cache is in use already"


def test_spare_when_all_was_resumed_at_once() -> None:
    device = Device()
    auto = AutoBucket(0.5, device.read)
    auto.before_resume()
    device.free -= 45 * GIB  # more than its share: CUDA graphs
    assert auto.spare(resumed=True) == 15 * GIB


def test_the_rank_with_the_least_decides() -> None:
    assert AutoBucket.agreed_bytes([40 * GIB, 5 * GIB, 90 * GIB]) == 256 << 20
    assert AutoBucket.agreed_bytes([40 * GIB]) == 2048 << 20


def test_without_device_memory_it_is_the_least() -> None:
    auto = AutoBucket(0.5, lambda: None)
    auto.before_resume()
    assert auto.spare(resumed=True) is None
    assert AutoBucket.agreed_bytes([None, None]) == LEAST_MEGABYTES << 20
    assert AutoBucket.agreed_bytes([90 * GIB, None]) == LEAST_MEGABYTES << 20, "one that is unknown may be the least"
