# SPDX-License-Identifier: Apache-2.0
"""The garbage collector is off during a sync and as before after it, whatever happens."""

from __future__ import annotations

import gc

import pytest

from verl_sync_plugin.memory.collection import no_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_off_and_as_before(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with no_collection():
            assert not gc.isenabled()
            with no_collection():
                pass
            assert not gc.isenabled(), "the inner one does not end the outer one"
        assert gc.isenabled() == enabled
        with pytest.raises(KeyError), no_collection():
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
