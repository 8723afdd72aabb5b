# SPDX-License-Identifier: Apache-2.0
"""Lets megatron-core and mbridge run on a CPU with gloo; active only with VERL_CPU_MCORE=1.

Megatron takes CUDA for granted, so this replaces CUDA functions of torch in the whole process. That is why it has its
own switch, and why it happens only in processes that do import Megatron.
"""

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

_FACTORIES = (
    *("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn"),
    *("zeros_like", "ones_like", "empty_like"),
)
# Norms of latent attention: Megatron's own module, and the one TransformerEngine fuses it into
_FUSED_NORMS = {"q_layernorm": "linear_q_up_proj", "kv_layernorm": "linear_kv_up_proj"}
_CUDA_NO_OPS = (
    *("synchronize", "empty_cache", "set_device", "ipc_collect", "reset_peak_memory_stats"),
    *("manual_seed", "manual_seed_all"),
)


def register_hooks() -> None:
    """Register the post-import hooks for megatron-core and mbridge."""
    for module_name, hook in _HOOKS.items():
        register_post_import_hook(hook, module_name)


class _NoStream:
    """Stands for CUDA streams and events: any method may be called and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _do_nothing

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


def _accept_padding_mask(dot_product_attention: ModuleType) -> None:
    """Translate attention masks.

    verl passes a [batch, seq] mask of tokens to keep, as TransformerEngine wants it; Megatron's own attention wants
    a [batch, 1, seq, seq] mask of positions to hide. Latent attention names its head sizes, which Megatron's own does
    not know; such a model can be built, loaded and exported, not run.
    """
    import torch

    attention: Any = dot_product_attention.DotProductAttention
    stock_init, stock_forward = attention.__init__, attention.forward

    @functools.wraps(stock_init)
    def init(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        stock_init(self, *args, **kwargs)

    @functools.wraps(stock_forward)
    def forward(self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.dim() == 2:
            length = attention_mask.shape[1]
            future = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
            attention_mask = future[None, None] | ~attention_mask.bool()[:, None, None, :]
        return stock_forward(self, query, key, value, attention_mask, *args, **kwargs)

    attention.__init__, attention.forward = init, forward


def _name_absent_layers(multi_latent_attention: ModuleType) -> None:
    """Put classes of which there are no instances for TransformerEngine's, so that ``isinstance`` can ask for them."""
    for name, value in list(vars(multi_latent_attention).items()):
        if name.startswith("TE") and not isinstance(value, type):
            setattr(multi_latent_attention, name, type(name, (), {}))


def _use_local_layers(llm_bridge: ModuleType) -> None:
    """Build layers from Megatron's own modules; TransformerEngine does not exist for the CPU."""
    namespace: Any = llm_bridge
    stock_spec = namespace.get_gpt_decoder_block_spec

    @functools.wraps(stock_spec)
    def get_spec(config: Any, use_transformer_engine: bool = True, **kwargs: Any) -> Any:
        return stock_spec(config, use_transformer_engine=False, **kwargs)

    namespace.get_gpt_decoder_block_spec = get_spec


def _map_local_norm_names(bridge: ModuleType) -> None:
    """Teach mbridge the local layers' names: its tables know only TransformerEngine's fused norms."""
    bridge_class: Any = bridge.Bridge
    stock_attention = bridge_class._weight_name_mapping_attention
    stock_mapping = bridge_class._weight_name_mapping_mcore_to_hf

    @functools.wraps(stock_mapping)
    def mapping(self: Any, mcore_weights_name: str) -> list[str]:
        name = mcore_weights_name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
        if not any("pre_mlp_layernorm" in known for known in self._MLP_MAPPING):
            name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
        return stock_mapping(self, name)

    @functools.wraps(stock_attention)
    def attention(self: Any, name: str) -> list[str]:
        for local, fused in _FUSED_NORMS.items():
            if not any(local in known for known in self._ATTENTION_MAPPING):
                name = name.replace(f".{local}.weight", f".{fused}.layer_norm_weight")
        return stock_attention(self, name)

    bridge_class._weight_name_mapping_mcore_to_hf = mapping
    bridge_class._weight_name_mapping_attention = attention


def _group_experts(backends: ModuleType) -> None:
    """Give Megatron's own layers grouped experts, which need TransformerEngine or a GPU."""
    namespace: Any = backends

    def grouped_mlp_modules(
        self: Any, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[Any, Any]:
        from megatron.core.transformer.mlp import MLPSubmodules
        from megatron.core.transformer.moe.experts import TEGroupedMLP

        from verl_sync_plugin.cpu.grouped_linear import ColumnParallelGroupedLinear, RowParallelGroupedLinear

        submodules = MLPSubmodules(linear_fc1=ColumnParallelGroupedLinear, linear_fc2=RowParallelGroupedLinear)
        return TEGroupedMLP, submodules

    namespace.LocalSpecProvider.grouped_mlp_modules = grouped_mlp_modules


_HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core": _redirect_cuda,
    "megatron.core.tensor_parallel.random": _use_cpu_rng,
    "megatron.core.transformer.dot_product_attention": _accept_padding_mask,
    "megatron.core.transformer.multi_latent_attention": _name_absent_layers,
    "mbridge.core.llm_bridge": _use_local_layers,
    "mbridge.core.bridge": _map_local_norm_names,
    "megatron.core.models.backends": _group_experts,
}
