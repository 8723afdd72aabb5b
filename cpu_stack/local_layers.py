# SPDX-License-Identifier: Apache-2.0
"""Megatron and Megatron-Bridge without TransformerEngine and ModelOpt: Megatron's own layers, and grouped experts for
them.

TransformerEngine does not exist for the CPU and is not on every GPU machine. Megatron-Bridge asks for it in three ways:
it imports names of it for its adapter layers, it takes a name that megatron-core has set to ``None`` for the real one,
and its models are built from its layers by default.
"""

import functools
import importlib
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

# Modules that import TransformerEngine unasked
_NEED_TRANSFORMER_ENGINE = frozenset({"megatron.bridge.peft.lora", "megatron.bridge.peft.lora_layers"})
_TRANSFORMER_ENGINE = ("transformer_engine", "transformer_engine.pytorch")
# What Megatron-Bridge imports of ModelOpt, and what it says of a model that is not quantized
_MODELOPT: dict[str, dict[str, Any]] = {
    "modelopt": {},
    "modelopt.torch": {},
    "modelopt.torch.opt": {},
    "modelopt.torch.opt.dynamic": {"DynamicModule": type("DynamicModule", (), {})},
    "modelopt.torch.quantization": {},
    "modelopt.torch.quantization.utils": {"is_quantized": lambda model: False},
}


def register_hooks() -> None:
    """Register the import hooks; a module already imported is changed at once."""
    if not hasattr(typing, "override"):  # Megatron-Bridge is written for Python 3.12
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _TransformerEngineFinder())
    sys.meta_path.append(_ModelOptFinder())  # last: a real one is found first
    for module_name, hook in _HOOKS.items():
        register_post_import_hook(hook, module_name)


class _ModelOptFinder(MetaPathFinder, Loader):
    """Finds the few modules of ModelOpt that Megatron-Bridge imports."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in _MODELOPT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_MODELOPT[module.__name__])


class _TransformerEngineFinder(MetaPathFinder):
    """Lets the modules that import TransformerEngine be imported; everywhere else it stays absent, which megatron-core
    asks for by importing it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _NEED_TRANSFORMER_ENGINE or _is_installed("transformer_engine"):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _WithStandIn(spec.loader)
        return spec


class _WithStandIn(Loader):
    """Runs a module with a stand-in of TransformerEngine, whose names are classes without instances."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # These decide for themselves whether TransformerEngine is there, and do so before it seems to be
        importlib.import_module("megatron.core.transformer.moe.moe_utils")
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        with _transformer_engine():
            self._inner.exec_module(module)


class _StandIn(ModuleType):
    """A module with every name: a class of torch modules that nobody makes."""

    __path__: list[str] = []
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        import torch

        value = _StandIn(f"{self.__name__}.{name}") if name == "ops" else type(name, (torch.nn.Module,), {})
        setattr(self, name, value)
        return value


@contextmanager
def _transformer_engine() -> Iterator[None]:
    modules = {name: _StandIn(name) for name in _TRANSFORMER_ENGINE}
    modules["transformer_engine"].pytorch = modules["transformer_engine.pytorch"]  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def _is_installed(package: str) -> bool:
    return package in sys.modules or PathFinder.find_spec(package) is not None


def _say_absent(module: ModuleType) -> None:
    """megatron-core has set the names to ``None``, which Megatron-Bridge takes for an import that worked."""
    if _is_installed("transformer_engine"):
        return
    for name, value in list(vars(module).items()):
        if name.startswith("HAVE_TE"):
            setattr(module, name, False)
        elif name.startswith("TE") and not isinstance(value, type | tuple):  # None, or what Megatron-Bridge puts there
            setattr(module, name, type(name, (), {}))


def _adapt_grouped_experts(peft_utils: ModuleType) -> None:
    """Let adapters be put on the stand-ins of TransformerEngine's grouped experts, as on the real ones."""
    _say_absent(peft_utils)
    if _is_installed("transformer_engine"):
        return
    from cpu_stack.grouped_linear import ColumnParallelGroupedLinear, RowParallelGroupedLinear

    namespace: Any = peft_utils
    namespace.TECL, namespace.TERL = (ColumnParallelGroupedLinear,), (RowParallelGroupedLinear,)
    namespace.HAVE_TE = True  # is asked only together with an instance of one of these


def _build_local_layers(gpt_provider: ModuleType) -> None:
    """Build models from Megatron's own layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    provider: Any = gpt_provider.GPTModelProvider
    stock = provider.provide

    def local_layers(config: Any, vp_stage: int | None = None) -> Any:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)

    @functools.wraps(stock)
    def provide(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_installed("transformer_engine"):
            self.transformer_layer_spec = local_layers
        return stock(self, *args, **kwargs)

    provider.provide = provide


def _know_grouped_experts(param_mapping: ModuleType) -> None:
    """Tell how the stand-ins of TransformerEngine's grouped experts are split, as of the real ones."""
    register = param_mapping.AutoMapping.register_module_type
    register("ColumnParallelGroupedLinear", "column")
    register("RowParallelGroupedLinear", "row")


def _accept_padding_mask(dot_product_attention: ModuleType) -> None:
    """Translate attention masks.

    verl passes a [batch, seq] mask of tokens to keep, as TransformerEngine wants it; Megatron's own attention wants
    a [batch, 1, seq, seq] mask of positions to hide. Latent attention names its head sizes, which Megatron's own does
    not know: it takes the values' heads for as wide as the model's others.
    """
    import torch

    attention: Any = dot_product_attention.DotProductAttention
    stock_init, stock_forward = attention.__init__, attention.forward

    @functools.wraps(stock_init)
    def init(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        stock_init(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    @functools.wraps(stock_forward)
    def forward(self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.dim() == 2:
            length = attention_mask.shape[1]
            future = torch.triu(torch.ones(length, length, dtype=torch.bool, device=attention_mask.device), 1)
            attention_mask = future[None, None] | ~attention_mask.bool()[:, None, None, :]
        return stock_forward(self, query, key, value, attention_mask, *args, **kwargs)

    attention.__init__, attention.forward = init, forward


def _name_absent_layers(multi_latent_attention: ModuleType) -> None:
    """Put classes of which there are no instances for TransformerEngine's, so that ``isinstance`` can ask for them."""
    for name, value in list(vars(multi_latent_attention).items()):
        if name.startswith("TE") and not isinstance(value, type):
            setattr(multi_latent_attention, name, type(name, (), {}))


def _group_experts(backends: ModuleType) -> None:
    """Give Megatron's own layers grouped experts, which come with TransformerEngine alone."""
    namespace: Any = backends
    stock = namespace.LocalSpecProvider.grouped_mlp_modules

    def grouped_mlp_modules(self: Any, moe_use_grouped_gemm: bool) -> Any:
        from megatron.core.transformer.moe import experts

        from cpu_stack.grouped_linear import ColumnParallelGroupedLinear, RowParallelGroupedLinear

        layers = {"linear_fc1": ColumnParallelGroupedLinear, "linear_fc2": RowParallelGroupedLinear}
        if not moe_use_grouped_gemm:
            return stock(self, moe_use_grouped_gemm)
        return functools.partial(experts.TEGroupedMLP, submodules=experts.GroupedMLPSubmodules(**layers))

    namespace.LocalSpecProvider.grouped_mlp_modules = grouped_mlp_modules


def _name_absent_gemm(moe_utils: ModuleType) -> None:
    """The router asks whether TransformerEngine's multiplication is None; where it is absent, so is the name."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


_HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.transformer.dot_product_attention": _accept_padding_mask,
    "megatron.core.transformer.multi_latent_attention": _name_absent_layers,
    "megatron.core.transformer.moe.moe_utils": _name_absent_gemm,
    "megatron.core.models.backends": _group_experts,
    **{f"megatron.bridge.peft.{name}": _say_absent for name in ("lora", "canonical_lora", "adapter_wrapper")},
    "megatron.bridge.peft.utils": _adapt_grouped_experts,
    "megatron.bridge.models.gpt_provider": _build_local_layers,
    "megatron.bridge.models.conversion.param_mapping": _know_grouped_experts,
}
