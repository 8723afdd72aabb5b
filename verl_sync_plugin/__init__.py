# SPDX-License-Identifier: Apache-2.0
"""verl-sync-plugin: takes over verl's resharding phase (trainer to rollout weight sync)."""

from pathlib import Path
from typing import Any

__version__ = "0.2.0"


def build() -> str:
    """The version, with the commit that the package was built from where that is known: ``0.2.0 (1a2b3c4d5e6f)``."""
    file = Path(__file__).with_name("COMMIT")  # setup.py writes it
    commit = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    return f"{__version__} ({commit})" if commit else __version__


def __getattr__(name: str) -> Any:
    # Every process of verl imports this package, and torch only where it needs it
    if name == "SpmdRollout":
        from verl_sync_plugin.spmd import SpmdRollout

        return SpmdRollout
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
