"""Merging any consecutive part of a weight equals the same part of PEFT's own merge, for shapes and ranks at random."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers.pytorch_utils import Conv1D

from verl_sync_plugin.lora.merge import Target, add_squares, merge_run
from verl_sync_plugin.lora.weights import LoRAWeight, lora_weights

Sizes = tuple[int, int]


class Experts(torch.nn.Module):
    """Fused expert weights, (experts, out, in) or (experts, in, out)."""

    def __init__(self, count: int, sizes: Sizes, transposed: bool) -> None:
        super().__init__()
        self.is_transposed = transposed
        self.stack = torch.nn.Parameter(torch.randn(count, *sizes))


LAYERS: dict[str, Callable[[Sizes, int], torch.nn.Module]] = {
    "linear": lambda sizes, k: torch.nn.Linear(*sizes),
    "conv1d-of-gpt2": lambda sizes, k: Conv1D(*sizes),
    "embedding": lambda sizes, k: torch.nn.Embedding(*sizes),
    "conv1d": lambda sizes, k: torch.nn.Conv1d(*sizes, k),
    "conv2d": lambda sizes, k: torch.nn.Conv2d(*sizes, k),
    "conv3d": lambda sizes, k: torch.nn.Conv3d(*sizes, k + 1),  # PEFT itself fails on 1x1x1
    "experts": lambda sizes, k: Experts(k + 1, sizes, transposed=False),
    "transposed-experts": lambda sizes, k: Experts(k + 1, sizes, transposed=True),
    "router": lambda sizes, k: Experts(1, sizes, transposed=False),
}
DORA = ("linear", "conv1d-of-gpt2", "embedding", "conv1d", "conv2d", "conv3d")


class Model(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer


def adapted(kind: str, sizes: Sizes, k: int, rank: int, dora: bool, rslora: bool) -> tuple[torch.nn.Module, torch.Size]:
    layer = LAYERS[kind](sizes, k)
    config = LoraConfig(r=rank, lora_alpha=7, use_dora=dora, use_rslora=rslora, target_modules=["layer"])
    if isinstance(layer, Experts):
        if kind == "router":
            layer.stack = torch.nn.Parameter(layer.stack.detach()[0])
        config = LoraConfig(
            r=rank, lora_alpha=7, use_rslora=rslora, target_modules=[], target_parameters=["layer.stack"]
        )
    shape = next(layer.parameters()).shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT corrects fan_in_fan_out for Conv1D
        model = get_peft_model(Model(layer), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    return model, shape


def factors_of(model: torch.nn.Module, weight: LoRAWeight) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {key: state[key] for key in weight.keys}


@pytest.mark.parametrize("kind", LAYERS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_part_equals_pefts_merge(kind: str, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9), label="seed"))
    sizes = data.draw(st.tuples(st.integers(2, 9), st.integers(2, 9)), label="sizes")
    dora = kind in DORA and data.draw(st.booleans(), label="dora")
    model, shape = adapted(
        kind, sizes, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), dora, data.draw(st.booleans())
    )
    (weight,) = lora_weights(model)
    base = model.state_dict()[weight.name].clone()
    start = data.draw(st.integers(0, 5), label="start")
    target = Target(weight, start, tuple(shape))
    flat = torch.cat([torch.full((start,), 5.0), base.reshape(-1), torch.full((3,), 6.0)])
    cuts = sorted(data.draw(st.lists(st.integers(0, flat.numel()), max_size=4), label="cuts"))
    runs = list(zip([0, *cuts], [*cuts, flat.numel()], strict=True))
    factors = factors_of(model, weight)
    scale = None
    if dora:
        sums = torch.zeros(target.scales)
        for low, high in runs:
            if target.overlaps(low, high - low):
                add_squares(flat[low:high].clone(), low, target, factors, sums)
        scale = factors[weight.magnitude or ""].reshape(-1) / sums.sqrt()
    merged = flat.clone()
    for low, high in runs:
        if target.overlaps(low, high - low):
            merge_run(merged[low:high], low, target, factors, scale)
    model.merge_adapter()
    expected = model.state_dict()[weight.name]
    torch.testing.assert_close(merged[start : start + base.numel()].view(shape), expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(expected, base)
    assert bool((merged[:start] == 5).all()) and bool((merged[start + base.numel() :] == 6).all())


def test_a_grouped_convolution_is_refused_by_name() -> None:
    model = get_peft_model(Model(torch.nn.Conv1d(4, 4, 3, groups=2)), LoraConfig(r=2, target_modules=["layer"]))
    with pytest.raises(ValueError, match=r"'base_model.model.layer' is a convolution of 2 groups"):
        lora_weights(model)
