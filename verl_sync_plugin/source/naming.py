"""From the trainer's state-dict names to HF names, as views.

verl renames some keys and unfuses MoE experts while it streams tensors. The same functions run here once, on meta
tensors: a meta view keeps its storage, offset and strides, so what verl does to the real tensor can be read off
without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from verl_sync_plugin.bucket import View

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")

Rewrite = Callable[[Iterable[tuple[str, torch.Tensor]]], Iterator[tuple[str, torch.Tensor]]]


def clean_name(name: str) -> str:
    """A module or parameter name without the segments that FSDP1 and activation checkpointing insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def hf_views(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    start: int,
    rewrite: Rewrite,
    strides: tuple[int, ...] | None = None,
) -> list[View]:
    """The HF tensors that ``rewrite`` makes of one trainer tensor.

    Args:
        name: trainer's name.
        shape: full shape.
        dtype: any; only the layout matters.
        start: first element of the tensor in its base.
        rewrite: generator function from (name, tensor) pairs to (name, tensor) pairs.
        strides: of the tensor in its base, in elements; ``None`` when it is contiguous.

    Raises:
        ValueError: ``rewrite`` computes new data instead of viewing the old.
    """
    whole = torch.empty(shape, dtype=dtype, device="meta")
    if strides is not None:
        whole = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    views = []
    for hf_name, tensor in rewrite([(name, whole)]):
        if tensor.untyped_storage()._cdata != whole.untyped_storage()._cdata or tensor.dtype != whole.dtype:
            raise ValueError(
                f"parameter {name!r} becomes {hf_name!r} by a computation, not by slicing; weight sync does not "
                "support this model. Set actor_rollout_ref.rollout.custom.sync.enabled=False to run stock verl."
            )
        if tensor.numel():
            views.append(_view(hf_name, tensor, start))
    return views


def _view(name: str, tensor: torch.Tensor, start: int) -> View:
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    return View(name, tuple(tensor.shape), start + int(tensor.storage_offset()), span, strides)


def verl_rewrite(model_type: str | None) -> Rewrite:
    """verl's own rewriting of FSDP weight streams for a HF ``model_type``."""
    from verl.workers.engine.fsdp.transformer_impl import unfuse_moe_params

    return lambda pairs: unfuse_moe_params(pairs, model_type)
