# SPDX-License-Identifier: Apache-2.0
"""The CPU as a platform of verl: one device without memory accounting, gloo, and logical GPUs as Ray resources.

Hazard: a hook in shims.py imports this module in the middle of verl's own import. Whoever imports it before verl runs
into a circular import; get the platform from ``verl.plugin.platform.get_platform``.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase


class CpuDeviceModule(types.ModuleType):
    """``torch.cpu``, completed by what verl calls on ``torch.cuda``.

    It is an explicit list: a call that verl adds one day fails by name here instead of silently doing nothing.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        """Return False: code guarded by this question needs a real accelerator."""
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_device_name(self, device: Any = None) -> str:
        """Return a name that verl's table of peak FLOPs does not contain."""
        return "cpu"

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(new_state)

    def _no_bytes(self, device: Any = None) -> int:
        return 0

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    memory_allocated = max_memory_allocated = memory_reserved = max_memory_reserved = _no_bytes
    empty_cache = ipc_collect = set_per_process_memory_fraction = _do_nothing
    reset_peak_memory_stats = reset_accumulated_memory_stats = _do_nothing


_DEVICE_MODULE = CpuDeviceModule("cpu_stack.device", CpuDeviceModule.__doc__)


class CpuPlatform(PlatformBase):
    """CPU backend for verl's platform registry; shims.py registers it as ``cpu``."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        """Return the device itself, not a number: verl passes the answer to ``Tensor.to``."""
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: CPU work is complete when its call returns."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: torch's CPU allocator has no settings."""

    def empty_cache(self) -> None:
        """Do nothing: torch's CPU allocator has no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return the variable that Ray sets for logical GPUs."""
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        """Return GPU: verl places one rank per GPU, and ``ray.init(num_gpus=N)`` declares logical ones."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return Ray's switch for the variable above."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Mark nothing: there is no device profiler."""
        yield

    def profiler_start(self) -> None:
        """Do nothing: there is no device profiler."""

    def profiler_stop(self) -> None:
        """Do nothing: there is no device profiler."""

    def is_ipc_supported(self) -> bool:
        """Return False: there are no device memory handles."""
        return False

    def cudart(self) -> None:
        return None
