# SPDX-License-Identifier: Apache-2.0
"""The size of a bucket: its two keys, and what ``auto`` makes of the memory that is free. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

SHORT_BUCKET_KEY = "actor_rollout_ref.rollout.update_weights_bucket_megabytes"
LONG_BUCKET_KEY = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"

AUTO = "auto"
# The plugin packs into two buckets of device memory: verl's default of 2 GiB is too much here, and larger buckets are
# hardly faster
DEFAULT_MEGABYTES = 512

STAGING_BUCKETS = 2  # what the staging memory may take, in buckets of the size that the user sets
# Where there is room, staging memory stays while the trainer trains and the engine generates: a small share
STAGING_SHARE = 8
LEAST_MEGABYTES = 64
MOST_MEGABYTES = 2048  # on an H200, 15 GB took 29.8 ms at 512 MiB, 24.2 ms at 1024 and 22.7 ms at 2048

Reading = tuple[int, int]  # free and total bytes of this rank's device


def settled_megabytes(short: Any, long: Any, given: bool, stock: int, syncs: bool) -> tuple[Any, Any]:
    """Returns values for the short and the long key that both say what the run uses; settling twice changes nothing.

    Args:
        short: ``rollout.update_weights_bucket_megabytes``, ``None`` when not given.
        long: ``rollout.checkpoint_engine.update_weights_bucket_megabytes``.
        given: somebody has set the long key.
        stock: verl's own default of it.
        syncs: the plugin moves the weights of this run; otherwise verl reads the long key alone.
    """
    if not given:
        default = min(stock, DEFAULT_MEGABYTES) if syncs else stock
        long = default if short is None or short == AUTO else short
    # Any other value stays where it was given, so that the check names its key
    if short is None and syncs and isinstance(long, int) and not isinstance(long, bool) and long > 0:
        short = long
    return short, long


def check_bucket_megabytes(short: Any, long: Any) -> int | None:
    """The bucket size in MiB from the short and the long key; ``None`` for ``auto``.

    Args:
        short: ``rollout.update_weights_bucket_megabytes``, ``None`` when not given.
        long: ``rollout.checkpoint_engine.update_weights_bucket_megabytes``.

    Raises:
        ValueError: neither ``auto`` nor a positive integer, ``auto`` on the long key, or both given and different.
    """
    if long == AUTO:
        raise ValueError(f"{LONG_BUCKET_KEY}={long}: verl reads a number there. Use {SHORT_BUCKET_KEY}={AUTO}.")
    for key, value in ((SHORT_BUCKET_KEY, short), (LONG_BUCKET_KEY, long)):
        if key == SHORT_BUCKET_KEY and (value is None or value == AUTO):
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            remedy = f"{key}=512, or {SHORT_BUCKET_KEY}={AUTO}" if key == SHORT_BUCKET_KEY else f"{key}=512"
            raise ValueError(f"{key}={value!r}: not a whole number of MiB. Use for example {remedy}.")
        if value <= 0:
            raise ValueError(f"{key}={value}: a bucket must hold at least 1 MiB. Use for example {key}=512.")
    # With "auto" the long key holds our default, for those parts of verl that read it
    if short is not None and long != (DEFAULT_MEGABYTES if short == AUTO else short):
        raise ValueError(
            f"{SHORT_BUCKET_KEY}={short} and {LONG_BUCKET_KEY}={long} are both given and differ. "
            "Remove one of them, or give both the same value."
        )
    return None if short == AUTO else int(long)


def auto_megabytes(spare: int) -> int:
    """The largest power of two with which the staging memory takes at most 1/``STAGING_SHARE`` of ``spare`` bytes.

    Never below ``LEAST_MEGABYTES``, whatever is spare, and never above ``MOST_MEGABYTES``.
    """
    allowed = max(spare, 0) // STAGING_SHARE // STAGING_BUCKETS >> 20
    rounded = 1 << (allowed.bit_length() - 1) if allowed else 0
    return min(max(rounded, LEAST_MEGABYTES), MOST_MEGABYTES)


class AutoBucket:
    """The ``auto`` bucket size of one run: measured once, when the engine's weights are back and its KV cache is not.

    Args:
        static_fraction: share of a device that the engine takes for weights and KV cache together.
        read: the device's memory; ``None`` where there is none to measure. Every rank then takes
            ``LEAST_MEGABYTES``: on a CPU buckets are shared memory, of which a container may have very little.
    """

    def __init__(self, static_fraction: float, read: Callable[[], Reading | None]) -> None:
        self._static_fraction = static_fraction
        self._read = read
        self._asleep: Reading | None = None

    def before_resume(self) -> None:
        """Reads what is free while the engine sleeps."""
        self._asleep = self._read()

    def spare(self, resumed: bool) -> int | None:
        """Bytes that are free on this rank's device and will not be taken by the engine's KV cache.

        Args:
            resumed: the engine has just resumed memory; otherwise it was awake, and holds its KV cache already.
        """
        now = self._read()
        if now is None or self._asleep is None:
            return None
        free, total = now
        static = int(self._static_fraction * total) if resumed else 0
        returned = max(self._asleep[0] - free, 0)
        return free - max(static - returned, 0)

    @staticmethod
    def agreed_bytes(spares: Sequence[int | None]) -> int:
        """The bucket size in bytes from all ranks' ``spare``: the least counts, so it is the same on every rank."""
        known = [spare for spare in spares if spare is not None]
        return (auto_megabytes(min(known)) if len(known) == len(spares) else LEAST_MEGABYTES) << 20
