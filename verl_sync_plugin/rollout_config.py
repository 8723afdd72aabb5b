"""verl's ``RolloutConfig`` with the short bucket key; what ``_target_`` of the composed rollout config names."""

from __future__ import annotations

from dataclasses import dataclass

from verl.workers.config import RolloutConfig

from verl_sync_plugin import plugin
from verl_sync_plugin.bucket_size import check_bucket_megabytes
from verl_sync_plugin.config import refuse_cuda_graph, refuse_unsupported, sync_config_of


@dataclass
class SyncRolloutConfig(RolloutConfig):
    """Every verl process that builds a rollout config passes here, so this is where a broken set-up is caught.

    Attributes:
        update_weights_bucket_megabytes: the short key, a number or ``auto``; ``None`` when only the long one is used.

    Raises:
        ValueError: see ``sync_config_of``, ``check_bucket_megabytes`` and ``refuse_unsupported``.
        RegistryConflictError: another plugin has taken one of our registry keys.
    """

    update_weights_bucket_megabytes: int | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rollout(self)
        plugin.verify_registered(self)


def check_rollout(rollout: object) -> None:
    """Everything that can be wrong with the keys of a rollout config (dataclass or DictConfig).

    Raises:
        ValueError: names key, value and remedy.
    """
    get = rollout.get  # type: ignore[attr-defined]
    if get("name", None) != "sglang" or not sync_config_of(rollout).enabled:
        return
    check_bucket_megabytes(
        get("update_weights_bucket_megabytes", None), get("checkpoint_engine").update_weights_bucket_megabytes
    )
    refuse_cuda_graph(sync_config_of(rollout))
    if get("checkpoint_engine").get("backend", "naive") == "naive":  # the others keep verl's own transfer
        refuse_unsupported(rollout)
