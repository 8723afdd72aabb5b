# SPDX-License-Identifier: Apache-2.0
"""Everything under ``actor_rollout_ref.rollout.custom.sync``, and the two keys of a bucket's size. Imports no torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from itertools import combinations
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
KEY_PREFIX = f"{ROLLOUT}.custom.sync"
BUCKET = "update_weights_bucket_megabytes"  # the last word of both keys
SHORT_BUCKET_KEY = f"{ROLLOUT}.{BUCKET}"
LONG_BUCKET_KEY = f"{ROLLOUT}.checkpoint_engine.{BUCKET}"
DIFFER = "are both given and differ. Remove one of them, or give both the same value."
# verl's default of 2 GiB is too much for memory on the device, and larger buckets are hardly faster
DEFAULT_MEGABYTES = 512
TURN_OFF = f"set {KEY_PREFIX}.enabled=False to run stock verl"

# verl's strategies for which a sharding manager to SGLang is built in
TRAINERS = ("fsdp", "fsdp2", "megatron")
# verl registers its engines for a device only; a (device, vendor) entry is looked up before it
VENDOR = "nvidia"
SEPARATE_BACKEND = "sync_plugin"  # verl's ``checkpoint_engine.backend`` of a rollout on GPUs of its own
NOT_IN_USE = "weight sync NOT IN USE"  # begins the line of a run that the plugin cannot serve
SHARES_GPU = "_another_engine_on_this_gpu"  # set by our trainer next to ``sync``: no cache of the trainer may stay


class SyncConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the sync; the defaults suit any run.

    Attributes:
        enabled: False gives stock verl, unchanged.
        timeout_seconds: bound on every wait of a rank for its engine or its device; when it passes, all ranks raise the
            same ``SyncError``. Ranks wait three times as long and a minute for each other.
        verify: after which syncs what lies in the engine's own parameters is compared with what was sent: ``first``
            (three of every plan), or a number: the first and from then on every n-th.
        pause: what becomes of a separate rollout's requests in flight while its weights are synced. ``abort``: they go
            back to verl's client, which asks again; ``retract``: the engine prefills them again; ``in_place``: they go
            on with the KV cache of the old weights (``docs/design/pause.md``).
        delivery: ``auto``: the engine reads parameters where they lie, if it can; ``staged``: never.
        max_probs_diff: the run stops when verl's ``training/rollout_probs_diff_mean`` exceeds this; ``None``: never.
    """

    enabled: bool = True
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 300.0
    verify: Literal["never", "first", "always"] | Annotated[int, msgspec.Meta(ge=1)] = "first"
    pause: Literal["abort", "retract", "in_place"] = "abort"
    delivery: Literal["auto", "staged"] = "auto"
    max_probs_diff: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any] | None) -> SyncConfig:
        """Checks the content of ``custom.sync``. Raises ValueError, which names key, value and remedy."""
        return cls(**{key: _checked(str(key), value) for key, value in dict(values or {}).items()})


_KNOWN = get_type_hints(SyncConfig, include_extras=True)
_USE = {
    "enabled": f"{KEY_PREFIX}.enabled=True or False",
    "timeout_seconds": "for example 300 (seconds, at most a day)",
    "verify": "one of never, first, always, or a number: 10 for every tenth sync",
    "pause": "one of abort, retract, in_place",
    "delivery": "one of auto, staged",
    "max_probs_diff": "for example 0.02, or remove it",
}


def _checked(key: str, value: Any) -> Any:
    named = f"{KEY_PREFIX}.{key}={value!r}: "
    if key not in _KNOWN:
        close = difflib.get_close_matches(key, _KNOWN, n=1)
        hint = f"Did you mean {KEY_PREFIX}.{close[0]}?" if close else f"Known keys: {', '.join(_KNOWN)}."
        raise ValueError(f"{named}unknown key. {hint}")
    try:
        if isinstance(value, float) and not math.isfinite(value):
            raise msgspec.ValidationError("not a finite number")
        return msgspec.convert(value, _KNOWN[key])
    except msgspec.ValidationError as error:
        raise ValueError(f"{named}{error}. Use {_USE[key]}.") from None


def section(holder: Any, key: str, name: str) -> Any:
    """The mapping under ``key`` of a config (dataclass, DictConfig or dict); empty where there is none. Raises
    ValueError where something else is there; ``name`` is the whole key, for the message."""
    value = holder.get(key, None)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={_plain(value)!r}: not a mapping. Use {name}.<key>=<value>.")
    return value


def refuse_near_misses(holder: Mapping[str, Any], known: Collection[str], name: str) -> None:
    """Raises ValueError for a key of a mapping that is nearly a known one. A key that ends in a known one is another
    word: ``async`` is not ``sync``."""
    for key in holder:
        word = str(key).lower()
        if key in known or any(word.endswith(each) and word != each for each in known):
            continue
        if close := difflib.get_close_matches(word, known, n=1, cutoff=0.75):
            raise ValueError(f"{name}.{key}={holder[key]!r}: unknown key. Did you mean {name}.{close[0]}?")


def refuse_misplaced(config: Any) -> None:
    """Raises ValueError for the plugin's settings under a part of their key's path, where nothing reads them."""
    from omegaconf import OmegaConf

    *path, last = KEY_PREFIX.split(".")
    for length in range(len(path)):
        for some in combinations(path, length):
            sync = OmegaConf.select(config, key := ".".join((*some, last)))
            if isinstance(sync, Mapping) and sync and {*_KNOWN}.issuperset(sync):
                name = next(iter(sync))
                raise ValueError(f"{key}.{name}={sync[name]!r}: nothing reads it there. Use {KEY_PREFIX}.{name}.")


def sync_config_of(rollout: Any) -> SyncConfig:
    name, _, key = KEY_PREFIX.rpartition(".")
    custom = section(rollout, "custom", name)
    refuse_near_misses(custom, (key,), name)
    sync = section(custom, key, KEY_PREFIX)
    return SyncConfig.from_mapping({key: _plain(sync[key]) for key in sync})  # by key: omegaconf's errors then name it


def _plain(value: Any) -> Any:
    """OmegaConf's ListConfig as a list; anything else as it is."""
    return list(value) if type(value).__name__ == "ListConfig" else value


def lora_rank_of(model: Any) -> int:
    """The LoRA rank of a model config, from the flat key or the ``lora`` block; 0 without LoRA."""
    return max(int(model.get("lora_rank", 0) or 0), int((model.get("lora", None) or {}).get("rank", 0) or 0))


def is_whole(value: Any, least: float = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def bucket_megabytes(short: Any, long: Any, given: bool = True) -> int:
    """The size of a bucket in MiB: the short key's value, else the long key's, of which at most 512 counts unless
    somebody has ``given`` it. Raises ValueError where both are given and differ, and for another value than a whole
    number from 1 on."""
    key, size = (LONG_BUCKET_KEY, long) if short is None else (SHORT_BUCKET_KEY, short)
    if not is_whole(size, 1):
        why = "a bucket must hold at least 1 MiB" if is_whole(size, -math.inf) else "not a whole number of MiB"
        raise ValueError(f"{key}={size!r}: {why}. Use for example {key}=512.")
    if given and None not in (short, long) and short != long:
        raise ValueError(f"{SHORT_BUCKET_KEY}={short} and {LONG_BUCKET_KEY}={long} {DIFFER}")
    return size if given or short is not None else min(size, DEFAULT_MEGABYTES)


def bucket_of(rollout: Any) -> int:
    """``bucket_megabytes`` of verl's rollout config as a dataclass, in which verl's own default counts as not given."""
    long, default = (getattr(each, BUCKET) for each in (rollout.checkpoint_engine, type(rollout.checkpoint_engine)))
    return bucket_megabytes(rollout.get(BUCKET, None), long, long != default)
