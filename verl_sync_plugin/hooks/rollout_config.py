# SPDX-License-Identifier: Apache-2.0
"""verl's ``RolloutConfig`` with the short bucket key; what ``_target_`` of the composed rollout config names."""

from __future__ import annotations

from dataclasses import dataclass

from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from verl_sync_plugin.config.refusals import refuse_values
from verl_sync_plugin.config.settings import (
    LONG_BUCKET_KEY,
    PREFIX,
    SEPARATE_BACKEND,
    SHORT_BUCKET_KEY,
    check_bucket_megabytes,
    given_value,
    section,
    settled_megabytes,
    sync_config_of,
)
from verl_sync_plugin.registered import verify_registered
from verl_sync_plugin.rollouts import rollout_of, serves


@dataclass
class SyncRolloutConfig(RolloutConfig):
    """verl's rollout config, checked whenever a process builds it: that is where a broken set-up is caught.

    Attributes:
        update_weights_bucket_megabytes: the short key; ``None`` when only the long one is used.

    Raises:
        ValueError: see ``check_rollout``.
        RegistryConflictError: another plugin has taken one of our registry keys.
    """

    update_weights_bucket_megabytes: int | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settle_buckets()
        check_rollout(self)
        verify_registered(self)

    def _settle_buckets(self) -> None:
        """Settles the bucket keys of a config that no driver has settled: one composed by a user's program, or by a
        multirun."""
        engine, stock = self.checkpoint_engine, CheckpointEngineConfig().update_weights_bucket_megabytes
        long = engine.update_weights_bucket_megabytes
        syncs = serves(self.name) and sync_config_of(self).enabled
        short, long = settled_megabytes(self.update_weights_bucket_megabytes, long, long != stock, stock, syncs)
        object.__setattr__(self, "update_weights_bucket_megabytes", short)  # the configs are frozen
        object.__setattr__(engine, "update_weights_bucket_megabytes", long)


def check_rollout(rollout: object) -> None:
    """Checks all keys of a rollout config (dataclass or settled DictConfig).

    Raises:
        ValueError: names key, value and remedy.
    """
    get = rollout.get  # type: ignore[attr-defined]
    if not serves(get("name", None)) or not sync_config_of(rollout).enabled:
        return
    engine = section(rollout, "checkpoint_engine", f"{PREFIX}.checkpoint_engine")
    check_bucket_megabytes(
        given_value(rollout, "update_weights_bucket_megabytes", SHORT_BUCKET_KEY),
        given_value(engine, "update_weights_bucket_megabytes", LONG_BUCKET_KEY),
    )
    refuse_values(PREFIX, rollout)
    moves = engine.get("backend", "naive") in ("naive", SEPARATE_BACKEND)  # the others keep verl's own transfer
    rollout_of(get("name")).refuse_keys(rollout, moves)
