# SPDX-License-Identifier: Apache-2.0
"""What a sync that does not write every engine parameter means."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.log import say
from verl_sync_plugin.transport.protocol import Coverage

FORMAT_KEY = "actor_rollout_ref.rollout.load_format"  # verl's


def check_coverage(
    coverage: Coverage,
    restores_uncovered: bool,
    first: bool,
    sent: Collection[str],
    layers: str = "",
) -> None:
    """Accepts full coverage, or constants that the engine restores by itself.

    A host copy holds what the engine had at its start. That justifies a buffer that no sync ever writes, for the
    model's class computes it. It justifies no weight: a parameter would be as old as the run, or as it was allocated
    where no checkpoint holds it.

    Args:
        coverage: what the engine rank's ledger found.
        restores_uncovered: the engine keeps a host copy of real weights.
        first: say in the log what is left to the host copy.
        sent: names of the tensors that the trainer sends.
        layers: what the message adds where trainer and engine have different numbers of layers.

    Raises:
        RuntimeError: parameters are unwritten or written in part, or buffers unwritten and lost while the engine slept;
            names them and the remedy.
    """
    if not coverage.missing:
        return
    stale = [each for each in coverage.missing if each[1] or each[0] in sent or each[0] not in coverage.buffers]
    if stale:
        raise RuntimeError(
            f"the sync leaves {len(stale)} of {coverage.expected} engine parameters unwritten, or writes them only in "
            f"part: {_shown(stale)}. {layers}The engine would not have the trainer's weights. Give trainer and engine "
            f"the same model, or one that the engine loads whole; or {TURN_OFF}, which does not notice."
        )
    text = f"the sync leaves {len(coverage.missing)} of {coverage.expected} engine parameters and buffers unwritten: "
    text += _shown(coverage.missing)
    if not restores_uncovered:
        raise RuntimeError(f"{FORMAT_KEY}=dummy: {text}. Without real weights they are random. Set {FORMAT_KEY}=auto.")
    if first:
        say(f"{text}; the engine keeps what it loaded at its start")


def _shown(missing: Sequence[tuple[str, int, int]]) -> str:
    return ", ".join(f"{name} ({wrote} of {total} elements)" for name, wrote, total in missing[:5])
