# SPDX-License-Identifier: Apache-2.0
"""What the engine of a script says of its weights, asked around the code that moves them; collective, as all of
``SpmdRollout``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_sync_plugin.spmd.engine import errors

if TYPE_CHECKING:
    from verl_sync_plugin.spmd.rollout import SpmdRollout


def digests(rollout: SpmdRollout) -> list[dict[str, str]] | None:
    """Digests of all parameters, of each rank of the engine by name; ``None`` on ranks that own no engine.

    Raises:
        RolloutError: an engine rank told none.
    """
    with errors("asking for digests"):
        found: list[dict[str, str]] | None = rollout._engine.call("asking for digests", "digests")
        return found


def check_weights(rollout: SpmdRollout, action: str) -> dict[str, str] | None:
    """An action of the engine's own checker of weights, and what it tells of the first rank's parameters.

    Raises:
        RolloutError: the engine cannot do that here.
    """
    with errors(action):
        found: dict[str, str] | None = rollout._engine.call(action, "check_weights", action)
        return found
