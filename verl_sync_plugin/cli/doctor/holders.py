# SPDX-License-Identifier: Apache-2.0
"""Who holds a key of verl's registries: the name of what is there, and the distribution that it comes from."""

from __future__ import annotations

import importlib.metadata
from typing import Any


def describe(found: Any) -> str:
    """A class, function or dotted name of some registry, with the distribution that it comes from."""
    name = found if isinstance(found, str) else f"{found.__module__}.{getattr(found, '__qualname__', found)}"
    return f"{name} (of {owner})" if (owner := distribution_of(name)) else name


def distribution_of(name: str) -> str:
    """The distribution that a dotted name's top package comes from; empty when it is unknown."""
    found = importlib.metadata.packages_distributions().get(name.partition(".")[0])
    return found[0] if found else _registrant(name.partition(".")[0])


def _registrant(package: str) -> str:
    """The distribution of a plugin of verl's that names a package, where its metadata list no files."""
    for point in importlib.metadata.entry_points(group="verl.plugins"):
        if point.value.partition(".")[0].partition(":")[0] == package and point.dist is not None:
            return str(point.dist.name)
    return ""
