# SPDX-License-Identifier: Apache-2.0
"""Where a model's own load says that it puts the bytes of each tensor.

Taken from the recording of one dry load. Nothing here is trusted: ``marks.py`` proves every place by a real load.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from verl_sync_plugin.copies.hulls import Hull
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.receiver.recording import Copy, Recording, Source

SHORT_RUN = 32  # bytes; what is placed in shorter ones is brought into the tensor's order before it is hashed
MOST_RUNS = 1 << 14
TIED_IN_PART = "shares a part of its bytes with another tensor"


@dataclass(frozen=True, eq=False)
class Held:
    """The elements of the model that one copy of its load writes.

    Attributes:
        name: of the tensor that they come from.
        dtype: of that tensor; the model's where that is narrower, and then everything here is as if the tensor had
            been sent in that dtype.
        target: the elements: a view of a parameter or buffer.
        order: its dimensions in the order in which the tensor has them.
        runs: from the tensor's bytes to those of the target's storage, or of ``unturned()`` where ``turned``.
        turned: the elements lie in another order than in the tensor, or in a wider dtype.
        ratio: bytes sent per byte of ``dtype``.
    """

    name: str
    dtype: torch.dtype
    target: torch.Tensor
    order: tuple[int, ...]
    runs: tuple[Run, ...]
    turned: bool
    ratio: int = 1

    @property
    def nbytes(self) -> int:
        """Of the elements in the model."""
        return self.target.nbytes

    @property
    def widened(self) -> bool:
        """The model keeps the elements in a wider dtype."""
        return self.target.dtype != self.dtype

    def absolute(self) -> Iterator[Run]:
        """The runs of what is not turned, from the bytes that are sent to addresses."""
        first = self.target.untyped_storage().data_ptr()
        for run in self.runs:
            source, width, stride = (self.ratio * number for number in (run.source, run.width, run.source_stride))
            yield Run(source, first + run.target, width, run.count, stride, run.target_stride)

    def unturned(self) -> torch.Tensor:
        """The elements as the tensor has them: uint8 of shape ``(n,)``, a copy."""
        lies = self.target.permute(self.order)
        if self.widened and (self.target.dtype, self.dtype) == (torch.float32, torch.bfloat16):
            narrow = (lies.view(torch.int32) >> 16).to(torch.int16)  # keeps the bits of a NaN
        else:
            narrow = lies.to(self.dtype)
        return narrow.contiguous().reshape(-1).view(torch.uint8)

    def beside(self) -> torch.Tensor:
        """Whether any element holds what no element of the narrower dtype gives: bool of shape ``()``."""
        back = self.target.to(self.dtype).to(self.target.dtype)
        return ((self.target != back) & ~self.target.isnan()).any()


def placements(recording: Recording, sources: Iterable[Source]) -> tuple[list[Held], dict[str, str]]:
    """What each copy of a recorded load writes, and the tensors of which that cannot be said, with the reason."""
    left_out, held = dict(recording.refused), list[Held]()
    dtypes = {source.name: source.dtype for source in sources}
    for copy in recording.copies:
        if copy.name in left_out or not copy.target.numel():
            continue
        found = _held(copy, dtypes[copy.name])
        if isinstance(found, str):
            left_out[copy.name] = found
        else:
            held.append(found)
    return [each for each in held if each.name not in left_out], left_out


def _held(copy: Copy, dtype: torch.dtype) -> Held | str:
    source, target = copy.source, copy.target
    ratio = 1
    if target.dtype != dtype and torch.promote_types(target.dtype, dtype) != target.dtype:
        if not (dtype == torch.float32 and target.dtype in (torch.bfloat16, torch.float16)):
            return f"is kept as {target.dtype} and sent as {dtype}"
        ratio, dtype = dtype.itemsize // target.dtype.itemsize, target.dtype
    source = source.expand(target.shape)
    if any(stride == 0 and size > 1 for stride, size in zip(source.stride(), target.shape, strict=True)):
        return "is written to several elements each"
    strides = source.stride()
    order = tuple(sorted(range(target.dim()), key=lambda dim: (-strides[dim], dim)))
    shape, steps = [target.shape[dim] for dim in order], [strides[dim] for dim in order]
    size = dtype.itemsize
    first, storage_first = int(source.storage_offset()) * size, int(target.storage_offset()) * size
    if target.dtype == dtype:
        lies = [target.stride(dim) for dim in order]
        runs = _runs(shape, steps, lies, first, storage_first, size)
        if runs is not None and (len(runs) == 1 or runs[0].width >= SHORT_RUN):
            return Held(copy.name, dtype, target, order, runs, turned=False, ratio=ratio)
    close = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    runs = _runs(shape, steps, close, first, 0, size)
    if runs is None:
        return "is placed in too many runs"
    return Held(copy.name, dtype, target, order, runs, turned=True, ratio=ratio)


def _runs(
    shape: Sequence[int], steps: Sequence[int], other_steps: Sequence[int], first: int, other_first: int, size: int
) -> tuple[Run, ...] | None:
    """Elements on two sides, their dimensions and steps in elements, as runs of bytes; ``None``: too many."""
    dims: list[tuple[int, int, int]] = []
    for many, step, other in zip(shape, steps, other_steps, strict=True):
        if many > 1 and dims and dims[-1][1:] == (many * step, many * other):
            dims[-1] = (dims[-1][0] * many, step, other)
        elif many > 1:
            dims.append((many, step, other))
    width = dims.pop()[0] if dims and dims[-1][1:] == (1, 1) else 1
    count, step, other = dims.pop() if dims else (1, 0, 0)
    if math.prod(many for many, _, _ in dims) > MOST_RUNS:
        return None
    places = itertools.product(*(range(many) for many, _, _ in dims))
    starts = [
        (sum(i * d[1] for i, d in zip(at, dims, strict=True)), sum(i * d[2] for i, d in zip(at, dims, strict=True)))
        for at in places
    ]
    return tuple(
        Run(first + a * size, other_first + b * size, width * size, count, step * size, other * size) for a, b in starts
    )


def owners_of(hulls: Iterable[Sequence[Hull]], sources: Iterable[Source]) -> tuple[dict[str, str], dict[str, str]]:
    """Under whose number the bytes of tied tensors are counted, and tensors that are tied in another way.

    Args:
        hulls: of all buckets.
        sources: the tensors.

    Returns:
        The owner of each tensor; and, with the reason, those that share only some of their bytes.
    """
    layouts = {source.name: source.layout for source in sources}
    owners: dict[str, str] = {}
    apart: dict[str, str] = {}
    for hull in itertools.chain.from_iterable(hulls):
        owner = hull.names[0]
        alike = hull.equal and len({layouts[name] for name in hull.names}) == 1
        if not alike or any(owners.setdefault(name, owner) != owner for name in hull.names):
            apart.update(dict.fromkeys(hull.names, TIED_IN_PART))
    return owners, apart
