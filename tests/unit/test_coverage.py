# SPDX-License-Identifier: Apache-2.0
"""What an engine parameter means that a sync does not write whole, with and without a host copy of the weights."""

from __future__ import annotations

import pytest

from verl_sync_plugin.transport.protocol import Coverage
from verl_sync_plugin.verify.coverage import check_coverage


def check(missing: tuple[tuple[str, int, int], ...], backup: bool, buffers: tuple[str, ...] = ()) -> None:
    check_coverage(Coverage(3, missing, buffers), backup, first=True, sent=("a.weight",), layers="Two. ")


@pytest.mark.parametrize("backup", [False, True])
@pytest.mark.parametrize("missing", [("a.weight", 0, 4), ("a.weight", 3, 4), ("experts.w13", 3, 4)])
def test_a_host_copy_is_no_excuse_for_what_is_synced(backup: bool, missing: tuple[str, int, int]) -> None:
    """Neither for a tensor that the trainer sends under this name, nor for one that is written in part."""
    with pytest.raises(RuntimeError, match=r"unwritten, or writes them only in part: .* of 4 elements\)"):
        check((missing,), backup, buffers=("a.weight", "experts.w13"))


@pytest.mark.parametrize("backup", [False, True])
def test_a_host_copy_is_no_excuse_for_a_parameter(backup: bool) -> None:
    """Whatever the engine loaded, the trainer does not hold it: a head that no checkpoint has, a layer too many."""
    with pytest.raises(RuntimeError, match=r"leaves 1 of 3 .*: lm_head\.weight \(0 of 4 elements\)\. Two\. "):
        check((("lm_head.weight", 0, 4),), backup)


def test_constants_are_left_to_a_host_copy(capsys: pytest.CaptureFixture[str]) -> None:
    check((), backup=False)
    check((("model.normalizer", 0, 1),), backup=True, buffers=("model.normalizer",))
    assert "model.normalizer (0 of 1 elements); the engine keeps what it loaded at its start" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=r"unwritten: model\.normalizer .*load_format=auto"):
        check((("model.normalizer", 0, 1),), backup=False, buffers=("model.normalizer",))
