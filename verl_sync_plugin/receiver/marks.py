# SPDX-License-Identifier: Apache-2.0
"""Proves by a real load where a model puts the bytes of each tensor.

The model's own ``load_weights`` is given marks, random numbers in place of weights, and loads them into its own
parameters as it would load a checkpoint. What then lies where a place is said to be must be the marks that were given,
compared by hash. So it does not matter who found a place, nor how: a wrong one does not hold the right marks. Unlike
weights, marks are never alike (norms are all ones, biases all zeros), so nothing that is mixed up looks right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from verl_sync_plugin.copies.blocks import Block
from verl_sync_plugin.copies.bucket_memory import RegionMemory
from verl_sync_plugin.copies.copier import Copier, Prepared
from verl_sync_plugin.copies.plain import flat_storage
from verl_sync_plugin.receiver.engine_model import EngineModel, partner_of
from verl_sync_plugin.receiver.placement import Held
from verl_sync_plugin.receiver.recording import Source

CHUNK_BYTES = 256 << 20  # of marks given to the model in one call; bounds the memory that they take
SEED = 20_251
FINITE = -0x4001  # clears the highest bit of every exponent, in bf16, fp16 and the upper half of fp32


class Reader:
    """Hashes bytes of a model's parameters.

    Attributes:
        copier: prepares what ``run`` runs.
        device: where bytes are read.

    Args:
        tensors: the model's; those on other devices are left alone.
        device: where bytes are read.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors if tensor.device == device}
        self._numbers = {storage: number for number, storage in enumerate(storages)}
        self._memory = memory_of([flat_storage(tensor) for tensor in storages.values()], device)
        self.copier = Copier(device, [])
        self.device = device

    def knows(self, held: Held) -> bool:
        """Whether the elements lie in one of the model's tensors."""
        return held.target.untyped_storage()._cdata in self._numbers

    def base(self, held: Held) -> int:
        """What the blocks of ``held`` have as their ``base``."""
        return self._numbers[held.target.untyped_storage()._cdata]

    def run(self, blocks: Prepared, sums: torch.Tensor) -> None:
        """Adds the hashes of what lies at the blocks' sources to the sums of their groups."""
        blocks.run(self._memory, sums, copy=False)

    def add_turned(self, held: Held, blocks: list[Block], sums: torch.Tensor) -> None:
        """The same for elements that have to be brought into their tensor's order first. Memory: a copy of them."""
        self.copier.prepare(blocks).run(memory_of([held.unturned()], self.device), sums, copy=False)


def memory_of(flats: Sequence[torch.Tensor], device: torch.device) -> RegionMemory:
    """Memory whose blocks count from the first byte of flat number ``base``; the flats are to be kept alive."""
    return RegionMemory(device, [flat.data_ptr() for flat in flats], flats)


def misplaced(
    model: EngineModel,
    sources: Sequence[Source],
    owners: Mapping[str, str],
    placed: Sequence[Held],
    reader: Reader,
) -> dict[str, str]:
    """Loads marks, and returns the tensors that do not lie where they are said to, with the reason.

    Overwrites what a load writes. Never raises for what a model makes of marks: then nothing is where it should be.

    Args:
        model: of this engine rank.
        sources: all tensors of the sync.
        owners: of tied tensors, which travel as one.
        placed: what is said.
        reader: of the model's tensors.
    """
    if not placed:
        return {}
    given, found = (torch.zeros(len(placed), dtype=torch.int64, device=reader.device) for _ in range(2))
    try:
        with torch.no_grad():
            for marks in _marks(sources, owners, model, reader.device):
                _hash_given(marks, placed, reader, given)
                model.load_weights(iter(marks))
    except Exception as error:  # whatever a model's loader makes of random numbers
        why = f"a load of marks failed: {type(error).__name__}: {error}"
        return dict.fromkeys((source.name for source in sources), why)
    if reader.device.type == "cuda":
        torch.cuda.empty_cache()  # the marks' memory, which the engine's KV cache may be about to need
    plain = [b for n, held in enumerate(placed) if not held.turned for b in _lies(held, n, reader.base(held))]
    reader.run(reader.copier.prepare(plain), found)
    for number, held in enumerate(placed):
        if held.turned:
            reader.add_turned(held, _lies(held, number, 0), found)
    wrong = (given != found).nonzero().flatten().tolist()
    return {placed[number].name: "its load puts it elsewhere than was recorded" for number in wrong}


def _hash_given(
    marks: list[tuple[str, torch.Tensor]], placed: Sequence[Held], reader: Reader, given: torch.Tensor
) -> None:
    """Adds the hashes of what is taken of some marks, before the model may write into them."""
    bases = {name: base for base, (name, _) in enumerate(marks)}
    here = [(number, held) for number, held in enumerate(placed) if held.name in bases]
    dtypes = {held.name: held.dtype for _, held in here if held.ratio > 1}
    flats = [_as_kept(tensor, dtypes.get(name, tensor.dtype)) for name, tensor in marks]
    blocks = [block for number, held in here for block in _read(held, number, bases[held.name])]
    reader.copier.prepare(blocks).run(memory_of(flats, reader.device), given, copy=False)


def _as_kept(marks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """All bytes of the storage of a tensor, rounded where the model does so: uint8 of shape ``(n,)``."""
    flat = flat_storage(marks)
    return flat if marks.dtype == dtype else flat.view(marks.dtype).to(dtype).view(torch.uint8)


def _read(held: Held, group: int, base: int) -> list[Block]:
    """What of the tensor's bytes is taken."""
    return [
        Block(
            run.source, 0, run.source, run.width, run.count, run.source_stride, 0, run.source_stride,
            base=base, group=group,
        )
        for run in held.runs
    ]  # fmt: skip


def _lies(held: Held, group: int, base: int) -> list[Block]:
    """Where these bytes lie in the model."""
    return [
        Block(
            run.target, 0, run.source, run.width, run.count, run.target_stride, 0, run.source_stride,
            base=base, group=group,
        )
        for run in held.runs
    ]  # fmt: skip


def _marks(
    sources: Sequence[Source], owners: Mapping[str, str], model: EngineModel, device: torch.device
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """All tensors as marks, as many in one go as make up ``CHUNK_BYTES``, each with those it is tied to or fused with;
    every tensor has a storage of its own, for some models write into what they are given, and some keep it."""
    by_name = {source.name: source for source in sources}
    tied: dict[str, list[str]] = {}
    for source in sources:
        tied.setdefault(owners.get(source.name, source.name), []).append(source.name)
    generator = torch.Generator(device).manual_seed(SEED)
    left = set(by_name)
    chunk: list[tuple[str, torch.Tensor]] = []
    nbytes = 0
    for first in by_name:
        together = [first] if first in left else []
        for name in together:  # grows on the way
            more = [*tied[owners.get(name, name)], partner_of(name, model.fused_pairs)]
            together += [each for each in more if each in left and each not in together]
        made: dict[str, torch.Tensor] = {}
        for name in together:
            left.remove(name)
            source, owner = by_name[name], owners.get(name, name)
            flat = made[owner].clone() if owner in made else made.setdefault(owner, _mark(source, generator))
            chunk.append((name, flat.as_strided(source.shape, source.meta().stride())))
            nbytes += chunk[-1][1].nbytes
        if nbytes >= CHUNK_BYTES:
            yield chunk
            chunk, nbytes = [], 0
    if chunk:
        yield chunk


def _mark(source: Source, generator: torch.Generator) -> torch.Tensor:
    """Random numbers, none of them NaN or Inf: flat, as many as the storage of the tensor has elements."""
    numel = source.meta().untyped_storage().nbytes() // source.dtype.itemsize
    device = generator.device
    if not source.dtype.is_floating_point:
        most = 2 if source.dtype == torch.bool else 64
        return torch.randint(0, most, (numel,), generator=generator, device=device).to(source.dtype)
    halves = -(-numel * source.dtype.itemsize // 2)
    bits = torch.randint(-(1 << 15), 1 << 15, (halves,), generator=generator, device=device, dtype=torch.int16)
    return bits.bitwise_and_(FINITE).view(torch.uint8)[: numel * source.dtype.itemsize].view(source.dtype)
