# SPDX-License-Identifier: Apache-2.0
"""What an engine parameter means that a sync does not write whole, with and without a host copy of the weights."""

from __future__ import annotations

import pytest

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.transport.protocol import Coverage
from verl_sync_plugin.verify.coverage import check_coverage


def check(missing: tuple[tuple[str, int, int], ...], backup: bool) -> None:
    check_coverage(Coverage(3, missing), SyncConfig(), backup, first=True, sent=("a.weight",))


@pytest.mark.parametrize("backup", [False, True])
@pytest.mark.parametrize("missing", [("a.weight", 0, 4), ("a.weight", 3, 4), ("experts.w13", 3, 4)])
def test_a_host_copy_is_no_excuse_for_what_is_synced(backup: bool, missing: tuple[str, int, int]) -> None:
    """Neither for a tensor that the trainer sends under this name, nor for one that is written in part."""
    with pytest.raises(RuntimeError, match=r"although the trainer sends them: .* of 4 elements\)"):
        check((missing,), backup)


def test_constants_are_left_to_a_host_copy(capsys: pytest.CaptureFixture[str]) -> None:
    check((), backup=False)
    check((("model.normalizer", 0, 1),), backup=True)
    assert "model.normalizer (0 of 1 elements); the engine keeps what it loaded at its start" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=r"unwritten: model\.normalizer .*weights_cpu_backup=on"):
        check((("model.normalizer", 0, 1),), backup=False)
