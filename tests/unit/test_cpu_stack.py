# SPDX-License-Identifier: Apache-2.0
"""The CPU stack is off unless asked for."""

from pathlib import Path

import pytest

from fresh_process import said

OURS = ("VERL_PLATFORM", "VERL_ENGINE_DEVICE", "VERL_ENGINE_VENDOR", "SGLANG_USE_CPU_ENGINE", "VERL_CPU_MCORE")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the test session are not of the interpreters that tests start."""
    for name in OURS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("platform", [{}, {"VERL_PLATFORM": "nvidia"}], ids=["unset", "nvidia"])
def test_a_new_interpreter_loads_nothing_of_ours_where_it_is_off(platform: dict[str, str], tmp_path: Path) -> None:
    code = "import sys; print({'cpu_stack', 'verl_sync_plugin', 'wrapt'} & {m.split('.')[0] for m in sys.modules})"
    assert said(tmp_path, code, **platform) == "set()"
