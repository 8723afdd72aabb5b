# SPDX-License-Identifier: Apache-2.0
"""Lets megatron-core run on a CPU with gloo; active only with VERL_CPU_MCORE=1.

Megatron takes CUDA for granted, so this replaces CUDA functions of torch in the whole process. That is why it has its
own switch, and why it happens only in processes that do import Megatron. Its layers are those of ``local_layers``.
"""

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

from cpu_stack import local_layers

_FACTORIES = (
    *("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn"),
    *("zeros_like", "ones_like", "empty_like"),
)
_CUDA_NO_OPS = (
    *("synchronize", "empty_cache", "set_device", "ipc_collect", "reset_peak_memory_stats"),
    *("manual_seed", "manual_seed_all"),
)


def register_hooks() -> None:
    """Register the post-import hooks for megatron-core."""
    for module_name, hook in _HOOKS.items():
        register_post_import_hook(hook, module_name)
    local_layers.register_hooks()


class _NoStream:
    """Stands for CUDA streams and events: any method may be called, and but for returning events does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _do_nothing

    def record_event(self, event: "_NoStream | None" = None) -> "_NoStream":
        return event or self

    def __enter__(self) -> "_NoStream":
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _names_cuda(device: Any) -> bool:
    return str(device).startswith("cuda")


def _redirect_cuda(megatron_core: ModuleType) -> None:
    """Turn torch's CUDA interface into a CPU one; Megatron's import itself calls none of it."""
    _redirect_cuda_functions()
    _redirect_tensor_factories()
    _redirect_tensor_methods()


def _redirect_cuda_functions() -> None:
    import torch

    cuda: Any = torch.cuda
    for name in _CUDA_NO_OPS:
        # One function each: TorchDynamo, which SGLang uses, refuses an object under two names
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.current_device = lambda: torch.device("cpu")
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda device=None: (0, 0)
    cuda.memory_allocated = lambda device=None: 0
    cuda.max_memory_allocated = lambda device=None: 0
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = lambda device=None: _NoStream()
    cuda.default_stream = lambda device=None: _NoStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda new_state, device=None: torch.set_rng_state(new_state)


def _redirect_tensor_factories() -> None:
    import torch
    from torch.utils._device import _device_constructors

    _device_constructors()  # cached: "with torch.device(...)" must go on knowing the originals, which are still called

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def create(*args: Any, **kwargs: Any) -> torch.Tensor:
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)  # verl's offloading asks for it; without a GPU there is none
            return factory(*args, **kwargs)

        return create

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _redirect_tensor_methods() -> None:
    import torch

    tensor: Any = torch.Tensor
    stock_to, stock_type = tensor.to, tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple("cpu" if isinstance(arg, str) and _names_cuda(arg) else arg for arg in args)
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return stock_to(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return stock_type(self, *args, **kwargs)
        # Megatron's mixed precision optimizer accepts only parameters that call themselves torch.cuda.*Tensor.
        return stock_type(self).replace("torch.", "torch.cuda.", 1)

    tensor.to, tensor.type = to, type_
    tensor.cuda = lambda self, *args, **kwargs: self
    module: Any = torch.nn.Module
    module.cuda = lambda self, device=None: self


def _use_cpu_rng(random: ModuleType) -> None:
    """Let Megatron's generator tracker switch between states of the CPU generator."""
    import torch

    namespace: Any = random
    namespace._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    namespace._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


def _split_by_numbers(token_dispatcher: ModuleType) -> None:
    """Let a tensor on the CPU count as moved there: as an array, which is what collectives take their sizes from."""
    namespace: Any = token_dispatcher
    stock_move = namespace.maybe_move_tensor_to_cpu

    @functools.wraps(stock_move)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor

    namespace.maybe_move_tensor_to_cpu = move


_HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core": _redirect_cuda,
    "megatron.core.tensor_parallel.random": _use_cpu_rng,
    "megatron.core.transformer.moe.token_dispatcher": _split_by_numbers,
}
