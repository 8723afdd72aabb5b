# SPDX-License-Identifier: Apache-2.0
"""Keeps Python's garbage collector out of a sync: among millions of objects one collection takes as long as the
sync."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Puts Python's cyclic garbage collector off; what is counted down to zero goes as ever."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
