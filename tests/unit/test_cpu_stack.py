# SPDX-License-Identifier: Apache-2.0
"""The CPU stack is off unless asked for, and corrects what it should when on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PTH_NAME = "verl_sync_cpu_stack.pth"
OURS = ("VERL_PLATFORM", "VERL_ENGINE_DEVICE", "VERL_ENGINE_VENDOR", "SGLANG_USE_CPU_ENGINE", "VERL_CPU_MCORE")


def run_python(code: str, **env: str) -> str:
    """Run code in a new interpreter, away from the source tree, without the test session's own settings."""
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean | env,
        cwd=sysconfig.get_path("purelib"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Python reports a failing .pth line on stderr, and goes on.
    assert "Error processing line" not in done.stderr
    return done.stdout.strip()


# One process for all that needs torch, verl or SGLang: importing these takes most of the time.
STACK = """
import json, torch, torchvision, torch.distributed, verl.utils.distributed
from verl.utils import device
from sglang.srt.utils import MultiprocessingSerializer as Serializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

module = device.get_torch_device()
try:
    unknown = repr(module.no_such_call)
except AttributeError as error:
    unknown = str(error)
monkey_patch_torch_reductions()
print(json.dumps({
    "sharing": torch.multiprocessing.get_sharing_strategy(),
    "torchvision": torchvision.__version__,
    "platform": [device.get_device_name(), str(device.get_device_id()), device.get_nccl_backend(),
                 device.get_resource_name()],
    "calls": [module.is_available(), module.memory_allocated(), module.empty_cache(), module.mem_get_info()[1] > 0,
              module.synchronize()],
    "unknown": unknown,
    "group": [verl.utils.distributed.initialize_global_process_group(),
              str(torch.distributed.get_backend_config())],
    "pickled": Serializer.deserialize(Serializer.serialize(torch.arange(3), output_str=True)).tolist(),
}))
"""


@pytest.fixture(scope="module")
def stack() -> dict[str, Any]:
    """What a process with VERL_PLATFORM=cpu finds in the real torch, torchvision, verl and SGLang."""
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    facts: dict[str, Any] = json.loads(run_python(STACK, VERL_PLATFORM="cpu", **one_rank).splitlines()[-1])
    return facts


class TestOff:
    """Without VERL_PLATFORM=cpu."""

    @pytest.mark.parametrize("platform", [None, "nvidia"])
    def test_a_new_interpreter_loads_nothing_of_ours(self, platform: str | None) -> None:
        ours = ("cpu_stack", "verl_sync_plugin", "wrapt")
        code = f"import sys; print([m for m in sys.modules if m.split('.')[0] in {ours}])"
        assert run_python(code, **({} if platform is None else {"VERL_PLATFORM": platform})) == "[]"


class TestOn:
    """With VERL_PLATFORM=cpu, and nothing else."""

    def test_environment_defaults_respect_what_is_set(self) -> None:
        code = f"import json, os; print(json.dumps({{n: os.environ.get(n) for n in {OURS!r}}}))"
        seen = json.loads(run_python(code, VERL_PLATFORM=" CPU "))
        assert seen["VERL_ENGINE_DEVICE"] == "cuda"
        assert seen["VERL_ENGINE_VENDOR"] == "nvidia"
        assert seen["SGLANG_USE_CPU_ENGINE"] == "1"
        seen = json.loads(run_python(code, VERL_PLATFORM="cpu", VERL_ENGINE_VENDOR="amd"))
        assert seen["VERL_ENGINE_VENDOR"] == "amd"

    def test_starting_imports_neither_torch_nor_verl(self) -> None:
        code = "import sys; print([m for m in ('torch', 'verl', 'sglang', 'ray') if m in sys.modules])"
        assert run_python(code, VERL_PLATFORM="cpu") == "[]"

    def test_a_spawned_process_is_activated_too(self) -> None:
        code = (
            "import os, subprocess, sys; del os.environ['SGLANG_USE_CPU_ENGINE'];"
            "print(subprocess.run([sys.executable, '-c', \"import os; print(os.environ['SGLANG_USE_CPU_ENGINE'])\"],"
            " capture_output=True, text=True).stdout)"
        )
        assert run_python(code, VERL_PLATFORM="cpu") == "1"

    def test_verl_chooses_the_cpu_platform(self, stack: dict[str, Any]) -> None:
        assert stack["platform"] == ["cpu", "cpu", "gloo", "GPU"]
        assert stack["sharing"] == "file_system" and stack["torchvision"]

    def test_device_calls_of_cuda_are_answered(self, stack: dict[str, Any]) -> None:
        assert stack["calls"] == [False, 0, None, True, None]

    def test_an_unknown_device_call_fails_by_name(self, stack: dict[str, Any]) -> None:
        assert "no_such_call" in stack["unknown"]

    def test_process_group_is_plain_gloo(self, stack: dict[str, Any]) -> None:
        assert stack["group"] == [[0, 0, 1], "cpu:gloo"]

    def test_sglang_pickles_cpu_tensors(self, stack: dict[str, Any]) -> None:
        assert stack["pickled"] == [0, 1, 2]

    def test_sglang_lora_needs_no_pinned_memory(self) -> None:
        # Beside it models can still be built under another device: transformers does, and so would compute nonsense
        code = "import torch, sglang.srt.lora.layers; print(torch.zeros(2, pin_memory=True).pin_memory().sum())\n"
        code += "with torch.device('meta'): print({str(make(3).device) for make in (torch.arange, torch.zeros)})"
        assert run_python(code, VERL_PLATFORM="cpu").splitlines()[-2:] == ["tensor(0.)", "{'meta'}"]

    @pytest.mark.slow
    def test_engine_flag_survives_the_sglang_loader(self) -> None:
        code = (
            "import os; from verl.workers.rollout import replica;"
            "replica.RolloutReplicaRegistry.get('sglang'); replica._load_sglang();"
            "print(os.environ['SGLANG_USE_CPU_ENGINE'])"
        )
        assert run_python(code, VERL_PLATFORM="cpu").splitlines()[-1] == "1"

    def test_megatron_has_its_own_switch(self) -> None:
        code = "import torch; import megatron.core; print(torch.cuda.device_count(), torch.zeros(1).cuda().device)"
        assert run_python(code, VERL_PLATFORM="cpu", VERL_CPU_MCORE="1") == "1 cpu"
        patched = "import torch, megatron.core; print(torch.zeros.__module__)"
        assert run_python(patched, VERL_PLATFORM="cpu") == run_python("import torch; print(torch.zeros.__module__)")


class TestSglKernelStandIn:
    """The stand-in offers what SGLang imports on a CPU, and no more."""

    def test_offers_only_what_is_imported_on_a_cpu(self) -> None:
        code = (
            "import sgl_kernel, sgl_kernel.kvcacheio as k;"
            "print(callable(k.transfer_kv_per_layer), hasattr(sgl_kernel, 'weight_packed_linear_cpu'),"
            " hasattr(sgl_kernel, 'gptq_gemm'), hasattr(k, '__wrapped__'))"
        )
        assert run_python(code, VERL_PLATFORM="cpu") == "True True False False"

    def test_calling_says_what_is_missing(self) -> None:
        code = "from sgl_kernel.kvcacheio import transfer_kv_per_layer as t\ntry: t(1)\nexcept Exception as e: print(e)"
        out = run_python(code, VERL_PLATFORM="cpu")
        assert "kvcacheio.transfer_kv_per_layer needs the real sgl_kernel" in out

    def test_a_real_package_wins(self, tmp_path: Path) -> None:
        (tmp_path / "sgl_kernel").mkdir()
        (tmp_path / "sgl_kernel" / "__init__.py").write_text("REAL = True\n")
        code = (
            f"import sys; sys.path.append({str(tmp_path)!r}); import sgl_kernel; print(sgl_kernel.REAL)\n"
            "try: import sgl_kernel.kvcacheio\nexcept ModuleNotFoundError: print('missing')"
        )
        assert run_python(code, VERL_PLATFORM="cpu").splitlines() == ["True", "missing"]
