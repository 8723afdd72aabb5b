# SPDX-License-Identifier: Apache-2.0
"""The CPU stack is off unless asked for, and corrects what it should when on."""

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


@pytest.mark.parametrize(
    ("given", "vendor"), [({"VERL_PLATFORM": " CPU "}, "nvidia"), ({"VERL_PLATFORM": "cpu", OURS[2]: "amd"}, "amd")]
)
def test_environment_defaults_respect_what_is_set(given: dict[str, str], vendor: str, tmp_path: Path) -> None:
    code = f"import os; print(*map(os.environ.get, {OURS[1:4]!r}))"
    assert said(tmp_path, code, **given).split() == ["cuda", vendor, "1"]


def test_what_the_stand_in_of_sgl_kernel_lacks_is_named(tmp_path: Path) -> None:
    code = "from verl.utils import device\nfrom sgl_kernel.kvcacheio import transfer_kv_per_layer\n"
    for call in ("transfer_kv_per_layer(1)", "device.get_torch_device().no_such_call"):
        code += f"try: {call}\nexcept Exception as error: print(error)\n"
    out = said(tmp_path, code, VERL_PLATFORM="cpu")
    assert "kvcacheio.transfer_kv_per_layer needs the real sgl_kernel" in out and "no_such_call" in out


def test_a_real_package_wins(tmp_path: Path) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("REAL = True\n")
    code = """
        import sgl_kernel; print(sgl_kernel.REAL)
        try: import sgl_kernel.kvcacheio
        except ModuleNotFoundError: print("missing")
        """
    assert said(tmp_path, code, VERL_PLATFORM="cpu").splitlines() == ["True", "missing"]
