# SPDX-License-Identifier: Apache-2.0
"""Small corrections that let verl and SGLang run without an accelerator.

``verl_sync_cpu_stack.pth`` calls :func:`activate` while Python starts, in every process: drivers, Ray workers,
SGLang's spawned schedulers. Nothing heavy may be imported here, so each correction is a post-import hook that runs
once, right after the module it corrects has been loaded, and never if that module is not used.
"""

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

from cpu_stack import gemma2, megatron
from cpu_stack.sgl_kernel_standin import StandInFinder

_ENV_DEFAULTS = {
    # verl looks engines up by (device, vendor), and knows none for a CPU: use what is registered for NVIDIA.
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_ENGINE_VENDOR": "nvidia",
    "SGLANG_USE_CPU_ENGINE": "1",
}
_CPU_ENGINE_FLAG = "SGLANG_USE_CPU_ENGINE"

_activated = False


def requested() -> bool:
    """True if the environment asks for the CPU stack."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def activate() -> None:
    """Set the environment's defaults and register all hooks. Does nothing a second time, or if not requested."""
    global _activated
    if _activated or not requested():
        return
    _activated = True
    for name, value in _ENV_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Last in the path: a real sgl_kernel, if installed, is always found first.
    sys.meta_path.append(StandInFinder())
    for module_name, hook in _HOOKS.items():
        register_post_import_hook(hook, module_name)
    if os.environ.get("VERL_CPU_MCORE") == "1":
        megatron.register_hooks()


def _share_tensors_by_file(torch_multiprocessing: ModuleType) -> None:
    """Make tensors picklable between any two processes.

    The default strategy, file descriptors, needs an authentication key that only a common parent process hands
    down; trainer and SGLang have none.
    """
    torch_multiprocessing.set_sharing_strategy("file_system")


def _declare_missing_ops(torchvision_extension: ModuleType) -> None:
    """Declare the operators that torchvision insists on even where its compiled part could not be loaded.

    The published wheel of torchvision needs CUDA libraries for its compiled part. It tolerates their absence,
    except that it registers shape functions for two operators without asking whether they exist.
    """
    if torchvision_extension._has_ops():
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    # A library takes its definitions along when it is collected: tie it to the module's lifetime.
    torchvision_extension._verl_sync_plugin_ops = library  # type: ignore[attr-defined]


def _leave_cpu_tensors_alone(patch_torch: ModuleType) -> None:
    """Keep SGLang's patched pickling away from CPU tensors.

    It replaces the device number in slot 6 of whatever torch returns, but a pickled CPU tensor has 3 slots.
    """
    modify = patch_torch._modify_tuple

    @functools.wraps(modify)
    def modify_if_present(items: tuple[Any, ...], index: int, modifier: Callable[[Any], Any]) -> tuple[Any, ...]:
        return modify(items, index, modifier) if index < len(items) else items

    patch_torch._modify_tuple = modify_if_present  # type: ignore[attr-defined]


def _register_platform(platform_manager: ModuleType) -> None:
    """Add the CPU platform to verl's registry, before verl asks for a platform the first time."""
    from cpu_stack.cpu_platform import CpuPlatform

    platform_manager.PlatformRegistry.register(platform="cpu")(CpuPlatform)


def _name_gloo_once(distributed: ModuleType) -> None:
    """Replace the process group backend "cpu:gloo,cpu:gloo", which torch rejects as a duplicate device type."""
    init_in_ray = distributed.initialize_global_process_group_ray

    @functools.wraps(init_in_ray)
    def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
        init_in_ray(timeout_second, backend or "cpu:gloo")

    def initialize_global_process_group(timeout_second: int = 36000) -> tuple[int, int, int]:
        init_in_ray(timeout_second, "cpu:gloo")
        return int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    distributed.initialize_global_process_group_ray = initialize_global_process_group_ray  # type: ignore[attr-defined]
    distributed.initialize_global_process_group = initialize_global_process_group  # type: ignore[attr-defined]


def _keep_cpu_engine_flag(replica: ModuleType) -> None:
    """Survive verl's SGLang loader, which sets the flag for its own imports and then deletes it from the environment.

    Without the flag, SGLang modules imported later in this process, and processes it spawns, would look for CUDA.
    """
    load = replica._load_sglang

    @functools.wraps(load)
    def load_sglang() -> type:
        flag = os.environ.get(_CPU_ENGINE_FLAG, "1")
        try:
            return load()
        finally:
            os.environ[_CPU_ENGINE_FLAG] = flag

    replica._load_sglang = load_sglang  # type: ignore[attr-defined]
    registry = replica.RolloutReplicaRegistry
    if registry._registry.get("sglang") is load:
        registry.register("sglang", load_sglang)


def _let_fsdp1_broadcast_on_cpu(init_utils: ModuleType) -> None:
    """Let FSDP1 send rank 0's parameters to the others from host memory, which gloo can and the check forbids."""
    init_utils._check_module_states_for_sync_module_states = lambda module_states: None  # type: ignore[attr-defined]


def _forget_pinning(lora_layers: ModuleType) -> None:
    """Let SGLang's LoRA code, which pins host memory everywhere, run where there is no device to pin it for."""
    torch = lora_layers.torch
    from torch.utils._device import _device_constructors

    # Cached: "with torch.device(...)" must go on knowing the originals. Transformers builds models under "meta", and
    # would else leave rotary frequencies as whatever is in memory
    _device_constructors()

    def without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        return unpinned

    for name in ("tensor", "zeros", "empty", "arange"):
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, device=None: self


def _attend_to_latents(attention_backend_handler: ModuleType) -> None:
    """Let SGLang's torch-native attention serve latent attention (DeepSeek).

    Without an entry of its own it gets Triton's, whose prefill hands over expanded keys, and this backend looks for
    keys nowhere but in the cache, which holds latents.
    """
    methods = attention_backend_handler.AttnForwardMethod
    registry = attention_backend_handler.AttentionBackendRegistry
    registry.register("torch_native", lambda attention, forward_batch: methods.MLA)


def _load_in_one_thread(loader_utils: ModuleType) -> None:
    """Have SGLang's models load CPU tensors as they load those of a GPU: in the thread that calls them, where the
    dispatch modes of the plugin see every write."""
    loader_utils.should_async_load = lambda weight: False  # type: ignore[attr-defined]


def _choose_ports_that_stay_free(server_args: ModuleType) -> None:
    """Give each engine a port for its process group that no connection can take before the engine binds it.

    SGLang looks for a free port and binds it seconds later, in another process. By default Linux gives outgoing
    connections no port below 32768, and Ray uses none between 20000 and that.
    """
    own: Any = getattr(server_args, "get_free_port", None)

    def get_free_port() -> int:
        ports = (20_500 + (os.getpid() + n) % 12_000 for n in range(12_000))
        return next(filter(own.__globals__["is_port_available"], ports))

    # Newer releases choose from such a range by themselves, and leave this name unused
    server_args.get_free_port = get_free_port  # type: ignore[attr-defined]


_HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "torch.multiprocessing": _share_tensors_by_file,
    "torch.distributed.fsdp._init_utils": _let_fsdp1_broadcast_on_cpu,
    "torchvision.extension": _declare_missing_ops,
    "sglang.srt.layers.attention.torch_native_backend": gemma2.attend_as_the_layer_says,
    "sglang.srt.layers.logits_processor": gemma2.cap_logits,
    "sglang.srt.lora.layers": _forget_pinning,
    "sglang.srt.models.deepseek_common.attention_backend_handler": _attend_to_latents,
    "sglang.srt.model_loader.utils": _load_in_one_thread,
    "sglang.srt.server_args": _choose_ports_that_stay_free,
    "sglang.srt.utils.patch_torch": _leave_cpu_tensors_alone,
    "verl.plugin.platform.platform_manager": _register_platform,
    "verl.utils.distributed": _name_gloo_once,
    "verl.workers.rollout.replica": _keep_cpu_engine_flag,
}
