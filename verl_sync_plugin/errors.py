# SPDX-License-Identifier: Apache-2.0
"""The errors this package raises on purpose."""


class IncompatibleHostError(RuntimeError):
    """verl or SGLang in this environment does not offer what the plugin hooks into."""


class RegistryConflictError(RuntimeError):
    """Another plugin occupies a verl registry key that this plugin needs."""


class SyncError(RuntimeError):
    """A weight sync failed; every rank of the trainer raises it with the same text.

    The trainer's weights are untouched, and the next ``update_weights`` starts from nothing. Requests to
    that engine are refused until it begins, because its weights may be half written.
    """


class HalfWrittenError(RuntimeError):
    """A rollout engine's weights may be half written: its last sync failed, or has not ended in time."""


class RankLostError(SyncError):
    """A rank died or did not answer in time, so the ranks cannot agree on anything any more."""


class RolloutError(RuntimeError):
    """A call of ``SpmdRollout`` other than a sync failed on some rank; every rank raises it with the same text."""
