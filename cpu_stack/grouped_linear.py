# SPDX-License-Identifier: Apache-2.0
"""Grouped experts without TransformerEngine: as many weights as experts, under TransformerEngine's names.

Megatron's own layers keep experts in separate modules, whose names no bridge knows.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.parallel_state import get_expert_tensor_parallel_world_size


class _GroupedLinear(torch.nn.Module):
    """``weight0`` to ``weightN``; takes tokens sorted by expert."""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, init_method: Callable[..., Any]
    ) -> None:
        super().__init__()
        self.config, self.num_gemms = config, num_gemms
        self.in_features, self.out_features = input_size, output_size  # of this rank, as TransformerEngine has them
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        for index in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
            init_method(weight.data)
            # What TransformerEngine sets, whether the weight is split or not and along whichever dimension
            for name, value in {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}.items():
                setattr(weight, name, value)
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            self.register_parameter(f"weight{index}", weight)

    def forward(self, tokens: torch.Tensor, tokens_per_expert: list[int]) -> tuple[torch.Tensor, None]:
        """Each expert's tokens times its weight."""
        groups = torch.split(tokens, list(tokens_per_expert))
        parts = [group @ weight.t() for group, weight in zip(groups, self.parameters(), strict=True)]
        return torch.cat(parts), None


class ColumnParallelGroupedLinear(_GroupedLinear):
    """Output features are split over the expert tensor parallel ranks."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, **kwargs: Any) -> None:
        size = get_expert_tensor_parallel_world_size()
        super().__init__(num_gemms, input_size, output_size // size, **_used(kwargs))


class RowParallelGroupedLinear(_GroupedLinear):
    """Input features are split over the expert tensor parallel ranks; the token dispatcher sums up."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, **kwargs: Any) -> None:
        size = get_expert_tensor_parallel_world_size()
        super().__init__(num_gemms, input_size // size, output_size, **_used(kwargs))


def _used(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in ("config", "init_method")}
