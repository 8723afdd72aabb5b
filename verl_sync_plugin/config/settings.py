# SPDX-License-Identifier: Apache-2.0
"""Everything under ``actor_rollout_ref.rollout.custom.sync``: one frozen dataclass. Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

KEY_PREFIX = "actor_rollout_ref.rollout.custom.sync"
TURN_OFF = f"set {KEY_PREFIX}.enabled=False to run stock verl"

# verl's strategies for which a sharding manager to SGLang is built in
TRAINERS = ("fsdp", "fsdp2", "megatron")
CPU_BACKUP_CHOICES = ("auto", "on", "off")
DELIVERY_CHOICES = ("auto", "direct", "sharded", "exchanged", "gathered", "broadcast")
EMPTY_CACHE_CHOICES = ("auto", "always")
PAUSE_CHOICES = ("abort", "retract", "in_place")
VERIFY_CHOICES = ("never", "first", "always")
WIRE_DTYPE_CHOICES = ("auto", "bfloat16", "float16", "float32")
# Ranks wait three times as long and a minute for each other, and polling takes milliseconds in 32 bits: about 715000
MOST_SECONDS = 86400
SEPARATE_BACKEND = "sync_plugin"  # verl's ``checkpoint_engine.backend`` with which trainer and rollout are apart
NOT_IN_USE = "weight sync NOT IN USE"  # how a run that the plugin could not serve is told so
MISSING = "???"  # omegaconf's mark of a value that is still to be given


_GUARD = "use max_probs_diff, which stops a run whose training/rollout_probs_diff_mean (verl's) is larger"
# Keys of earlier versions: what to do instead
GONE = dict.fromkeys(("canary", "canary_threshold", "canary_every"), _GUARD)


def _fail(key: str, value: Any, problem: str, remedy: str) -> ValueError:
    return ValueError(f"{KEY_PREFIX}.{key}={value!r}: {problem}. {remedy}")


@dataclass(frozen=True)
class SyncConfig:
    """Settings of the sync, all with defaults that suit a colocated run.

    Attributes:
        enabled: False gives stock verl, unchanged.
        weights_cpu_backup: whether SGLang keeps a host copy of its weights while asleep. ``auto``: off for model
            families whose every parameter and persistent buffer a sync is known to overwrite (checked again at the
            first sync), on for all others.
        wire_dtype: dtype in which floating-point parameters travel; ``auto`` is ``rollout.dtype``. Buffers always
            travel in their own dtype.
        keep_dtype: regular expressions (``re.search`` on the HF name); matching parameters keep the trainer's dtype.
        timeout_seconds: bound on every wait of a rank for its engine or its device; when it passes, all ranks raise the
            same ``SyncError``.
        release_cuda_graph: also release SGLang's CUDA graph memory during training and resume it in stage 2. Not where
            megatron-core is installed: imported by SGLang, it puts the memory saver into a mode that cannot.
        empty_cache: when the trainer hands cached device memory back around a sync. ``auto``: when the engine would not
            have enough left (``memory/room.py``); ``always``: every time, as stock verl does.
        check_finite: a NaN or Inf among the packed weights fails the sync and names the parameter.
        copy_plan: from the second sync on, replay the copies that the engine model's ``load_weights`` made instead of
            calling it.
        verify_hashes: hash every byte when it is packed and when the engine reads it, and compare.
        verify: after which syncs what lies in the engine's own parameters is compared with what was sent: ``never``,
            ``first`` (three of every plan), ``always``, or a number: the first and from then on every n-th.
        max_probs_diff: the run stops when verl's ``training/rollout_probs_diff_mean`` exceeds this; ``None``: never.
        delivery: ``direct``: from the second sync on every engine rank reads parameters where they lie; ``sharded``: it
            reads what it needs where the trainer ranks packed it; ``exchanged``: as ``sharded`` from the ranks of its
            own host, to each of which other hosts send a part of what they have packed; ``gathered``: every rank
            gathers everything, or where the rollout is separate ``broadcast``: trainer ranks send it to all rollout
            ranks; ``auto``: the first of these that is possible.
        pause: what becomes of a separate rollout's requests in flight while its weights are synced. ``abort``: they go
            back to verl's client, which asks again; ``retract``: the engine prefills them again; ``in_place``: they go
            on with the KV cache of the old weights (``docs/design/pause.md``).
    """

    enabled: bool = True
    weights_cpu_backup: str = "auto"
    wire_dtype: str = "auto"
    keep_dtype: tuple[str, ...] = (r"\.gate\.weight$", r"e_score_correction_bias$")
    timeout_seconds: float = 300.0
    release_cuda_graph: bool = False
    empty_cache: str = "auto"
    check_finite: bool = True
    copy_plan: bool = True
    verify_hashes: bool = True
    verify: str | int = "first"
    max_probs_diff: float | None = None
    delivery: str = "auto"
    pause: str = "abort"

    def __post_init__(self) -> None:
        for name in ("enabled", "check_finite", "release_cuda_graph", "copy_plan", "verify_hashes"):
            if not isinstance(getattr(self, name), bool):
                raise _fail(name, getattr(self, name), "not a boolean", f"Use {KEY_PREFIX}.{name}=True or False.")
        self._check_choice("weights_cpu_backup", CPU_BACKUP_CHOICES)
        self._check_choice("wire_dtype", WIRE_DTYPE_CHOICES)
        self._check_choice("delivery", DELIVERY_CHOICES)
        self._check_choice("empty_cache", EMPTY_CACHE_CHOICES)
        self._check_choice("pause", PAUSE_CHOICES)
        if self.delivery == "direct" and not self.copy_plan:
            remedy = f"Set {KEY_PREFIX}.copy_plan=True, or {KEY_PREFIX}.delivery=auto."
            raise _fail("delivery", self.delivery, "not possible with copy_plan=False", remedy)
        timeout = self.timeout_seconds
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            raise _fail("timeout_seconds", timeout, "not a positive number of seconds", "Use for example 300.")
        if timeout > MOST_SECONDS:
            raise _fail("timeout_seconds", timeout, "more than a day", "Use for example 300.")
        self._check_cadence("verify", VERIFY_CHOICES)
        most = self.max_probs_diff
        if most is not None and (isinstance(most, bool) or not isinstance(most, int | float) or not 0 < most <= 1):
            raise _fail("max_probs_diff", most, "not a probability above 0", "Use for example 0.02.")
        self._check_patterns()

    def _check_cadence(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        every = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not every and value not in choices:
            remedy = f"Use one of {', '.join(choices)}, or a number: 10 for every tenth sync."
            raise _fail(name, value, "not a known cadence", remedy)

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise _fail(name, value, "not a known choice", f"Use one of {', '.join(choices)}.")

    def _check_patterns(self) -> None:
        if not isinstance(self.keep_dtype, tuple) or not all(isinstance(p, str) for p in self.keep_dtype):
            raise _fail("keep_dtype", self.keep_dtype, "not a list of strings", r"Use for example ['\.router\.'].")
        for pattern in self.keep_dtype:
            try:
                re.compile(pattern)
            except re.error as error:
                raise _fail(
                    "keep_dtype", pattern, f"not a regular expression ({error})", "Correct the pattern."
                ) from None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any] | None) -> SyncConfig:
        """Builds the config from the plain mapping that travels in ``rollout.custom``.

        Args:
            values: the content of ``custom.sync``; ``None`` or empty means all defaults.

        Raises:
            ValueError: unknown key, wrong type or value; the text names key, value and remedy.
        """
        given = dict(values or {})
        known = [field.name for field in dataclasses.fields(cls)]
        for key, value in given.items():
            if key in GONE:
                raise _fail(key, value, "this key is gone", f"Remove it: {GONE[key]}.")
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f"Did you mean {KEY_PREFIX}.{close[0]}?" if close else f"Known keys: {', '.join(known)}."
                raise _fail(str(key), value, "unknown key", hint)
        # YAML 1.1 reads a bare on/off as a boolean
        backup = given.get("weights_cpu_backup")
        if isinstance(backup, bool):
            given["weights_cpu_backup"] = "on" if backup else "off"
        if isinstance(given.get("keep_dtype"), list):
            given["keep_dtype"] = tuple(given["keep_dtype"])
        return cls(**given)


def section(holder: Any, key: str, name: str) -> Any:
    """The mapping under ``key`` of a config (dataclass, DictConfig or dict); empty where there is none.

    Args:
        holder: what has the key.
        key: of the section.
        name: the whole key, for messages.

    Raises:
        ValueError: something else is there; names key, value and remedy.
    """
    value = given_value(holder, key, name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={_plain(value)!r}: not a mapping. Use {name}.<key>=<value>.")
    return value


def refuse_missing(holder: Any, key: str, name: str) -> None:
    """Raises ValueError when omegaconf's mark of a missing value is under ``key``; names key, value and remedy."""
    from omegaconf import OmegaConf

    # A DictConfig does not show the mark, a dict resolved from one does
    if OmegaConf.is_missing(holder, key) if OmegaConf.is_dict(holder) else str(holder.get(key, None)) == MISSING:
        raise ValueError(f"{name}={MISSING}: no value. Give it one, or remove the key.")


def given_value(holder: Any, key: str, name: str) -> Any:
    """The value under ``key`` in a config section; ``None`` when there is none.

    Raises:
        ValueError: omegaconf's mark of a missing value is there; see ``refuse_missing``.
    """
    refuse_missing(holder, key, name)
    return holder.get(key, None)


def refuse_near_misses(holder: Mapping[str, Any], known: Collection[str], name: str) -> None:
    """Raises ValueError for a key of a mapping that is nearly a known one, and leaves all others alone.

    A key that ends in a known one is another word: ``async`` is not ``sync``.

    Args:
        holder: the mapping.
        known: its keys.
        name: of the mapping, for messages.
    """
    for key in holder:
        word = str(key).lower()
        if key in known or any(word.endswith(each) and word != each for each in known):
            continue
        if close := difflib.get_close_matches(word, known, n=1, cutoff=0.75):
            raise ValueError(f"{name}.{key}={holder[key]!r}: unknown key. Did you mean {name}.{close[0]}?")


def refuse_misplaced(config: Any) -> None:
    """Raises ValueError for the plugin's settings under a part of their key's path, where nothing reads them.

    Args:
        config: what verl's main function gets.
    """
    from omegaconf import OmegaConf

    *path, last = KEY_PREFIX.split(".")
    known = {field.name for field in dataclasses.fields(SyncConfig)}
    for length in range(len(path)):
        for some in combinations(path, length):
            sync = OmegaConf.select(config, key := ".".join((*some, last)))
            if isinstance(sync, Mapping) and sync and known.issuperset(sync):
                name = next(iter(sync))
                raise ValueError(f"{key}.{name}={sync[name]!r}: nothing reads it there. Use {KEY_PREFIX}.{name}.")


def sync_config_of(rollout: Any) -> SyncConfig:
    """The ``SyncConfig`` of a rollout config (dataclass, DictConfig or dict).

    Raises:
        ValueError: ``rollout.custom`` or ``rollout.custom.sync`` is not a mapping, or ``SyncConfig`` refuses it.
    """
    name, _, key = KEY_PREFIX.rpartition(".")
    custom = section(rollout, "custom", name)
    refuse_near_misses(custom, (key,), name)
    sync = section(custom, key, KEY_PREFIX)
    for key in sync:
        refuse_missing(sync, key, f"{KEY_PREFIX}.{key}")
    return SyncConfig.from_mapping(
        {key: _plain(sync[key]) for key in sync}
    )  # by key, so that omegaconf's errors name it


def refuse_switched_off(config: SyncConfig) -> None:
    """Raises ValueError where the backend is asked for and the plugin switched off; names key, value and remedy."""
    if not config.enabled:
        raise ValueError(
            f"{KEY_PREFIX}.enabled=False with actor_rollout_ref.rollout.checkpoint_engine.backend={SEPARATE_BACKEND}: "
            f"that backend is the plugin's. Set {KEY_PREFIX}.enabled=True, or another backend, such as nccl."
        )


def _plain(value: Any) -> Any:
    """OmegaConf's ListConfig as a list; anything else as it is."""
    return list(value) if type(value).__name__ == "ListConfig" else value


def lora_rank_of(model: Any) -> int:
    """The LoRA rank of a model config, from the flat key or the ``lora`` block; 0 without LoRA."""
    block = model.get("lora", None) or {}
    return max(int(model.get("lora_rank", 0) or 0), int(block.get("rank", 0) or 0))
