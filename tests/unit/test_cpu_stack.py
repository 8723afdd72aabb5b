# SPDX-License-Identifier: Apache-2.0
"""The CPU stack is off unless asked for, and corrects what it should when on."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("VERL_PLATFORM", "VERL_ENGINE_DEVICE", "VERL_ENGINE_VENDOR", "SGLANG_USE_CPU_ENGINE", "VERL_CPU_MCORE")


def run_python(code: str, **env: str) -> str:
    """Run code in a new interpreter, away from the source tree, without the test session's own settings."""
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | env, cwd=sysconfig.get_path("purelib"), capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Python reports a failing .pth line on stderr, and goes on.
    assert "Error processing line" not in done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("platform", [{}, {"VERL_PLATFORM": "nvidia"}], ids=["unset", "nvidia"])
def test_a_new_interpreter_loads_nothing_of_ours_where_it_is_off(platform: dict[str, str]) -> None:
    ours = ("cpu_stack", "verl_sync_plugin", "wrapt")
    code = f"import sys; print([m for m in sys.modules if m.split('.')[0] in {ours}])"
    assert run_python(code, **platform) == "[]"


@pytest.mark.parametrize(
    ("given", "vendor"), [({"VERL_PLATFORM": " CPU "}, "nvidia"), ({"VERL_PLATFORM": "cpu", OURS[2]: "amd"}, "amd")]
)
def test_environment_defaults_respect_what_is_set(given: dict[str, str], vendor: str) -> None:
    seen = run_python(f"import os; print(*(os.environ.get(name) for name in {OURS[1:4]!r}))", **given)
    assert seen.split() == ["cuda", vendor, "1"]


def test_what_the_stand_in_of_sgl_kernel_lacks_is_named() -> None:
    code = "from verl.utils import device\nfrom sgl_kernel.kvcacheio import transfer_kv_per_layer\n"
    for call in ("transfer_kv_per_layer(1)", "device.get_torch_device().no_such_call"):
        code += f"try: {call}\nexcept Exception as error: print(error)\n"
    out = run_python(code, VERL_PLATFORM="cpu")
    assert "kvcacheio.transfer_kv_per_layer needs the real sgl_kernel" in out and "no_such_call" in out


def test_a_real_package_wins(tmp_path: Path) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("REAL = True\n")
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r}); import sgl_kernel; print(sgl_kernel.REAL)\n"
        "try: import sgl_kernel.kvcacheio\nexcept ModuleNotFoundError: print('missing')"
    )
    assert run_python(code, VERL_PLATFORM="cpu").splitlines() == ["True", "missing"]
