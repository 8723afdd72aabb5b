"""What a sync that does not write every engine parameter means."""

from __future__ import annotations

from verl_sync_plugin.config import KEY_PREFIX, SyncConfig
from verl_sync_plugin.log import say
from verl_sync_plugin.transport.protocol import Coverage


def check_coverage(coverage: Coverage, config: SyncConfig, restores_uncovered: bool, first: bool) -> None:
    """Accepts full coverage, or whatever the engine restores by itself.

    Args:
        coverage: what the engine rank's ledger found.
        config: for the message.
        restores_uncovered: the engine keeps a host copy of real weights.
        first: say in the log what is left to the host copy.

    Raises:
        RuntimeError: parameters are unwritten and were lost while the engine slept; names them and the remedy.
    """
    if not coverage.missing:
        return
    shown = ", ".join(f"{name} ({wrote} of {total} elements)" for name, wrote, total in coverage.missing[:5])
    text = f"the sync leaves {len(coverage.missing)} of {coverage.expected} engine parameters unwritten: {shown}"
    if not restores_uncovered:
        raise RuntimeError(
            f"{KEY_PREFIX}.weights_cpu_backup={config.weights_cpu_backup!r}: {text}. Without a host copy of real "
            f"weights they were lost while the engine slept. Set {KEY_PREFIX}.weights_cpu_backup=on and "
            "actor_rollout_ref.rollout.load_format=auto."
        )
    if first:
        say(f"{text}; the engine keeps what it loaded at its start")
