# SPDX-License-Identifier: Apache-2.0
"""Proves by a real load where a model puts the bytes of each tensor.

The model's own ``load_weights`` is given marks, random numbers in place of weights, and loads them into its own
parameters as it would load a checkpoint. What then lies where a place is said to be must be the marks that were given,
compared by hash. So it does not matter who found a place, nor how: a wrong one does not hold the right marks. Unlike
weights, marks are never alike (norms are all ones, biases all zeros), so nothing that is mixed up looks right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

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
ELSEWHERE = "its load puts it elsewhere than was recorded"
ALIGNMENT = 16  # bytes, of every tensor of marks
FINITE = -0x4001  # clears the highest bit of every exponent, in bf16, fp16 and the upper half of fp32


class _Mark(NamedTuple):
    """One tensor of marks; ``flat`` is all of its memory: uint8 of shape ``(n,)``."""

    name: str
    tensor: torch.Tensor
    flat: torch.Tensor


class Reader:
    """Hashes bytes of a model's parameters.

    Attributes:
        copier: prepares what ``run`` runs.
        device: where bytes are read.
        numbers: of the storages, by identity.

    Args:
        tensors: the model's; those on other devices are left alone.
        device: where bytes are read.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors if tensor.device == device}
        self.numbers = {storage: number for number, storage in enumerate(storages)}
        self._flats = [flat_storage(tensor) for tensor in storages.values()]
        self._memory = memory_of(self._flats, device)
        self.copier = Copier(device, [])
        self.device = device

    def knows(self, held: Held) -> bool:
        """Whether the elements lie in one of the model's tensors."""
        return held.target.untyped_storage()._cdata in self.numbers

    def base(self, held: Held) -> int:
        """What the blocks of ``held`` have as their ``base``."""
        return self.numbers[held.target.untyped_storage()._cdata]

    def whole(self) -> list[int]:
        """The hash of all that lies in each storage. Waits for the device."""
        sums = torch.zeros(len(self._flats), dtype=torch.int64, device=self.device)
        blocks = [Block(0, 0, 0, len(flat), base=n, group=n) for n, flat in enumerate(self._flats)]
        self.run(self.copier.prepare(blocks), sums)
        return list(sums.tolist())

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

    Overwrites what a load writes. Does not raise for what a model makes of marks: then nothing is where it should be.

    Args:
        model: of this engine rank.
        sources: all tensors of the sync.
        owners: of tied tensors, which travel as one.
        placed: what is said.
        reader: of the model's tensors.

    Raises:
        torch.OutOfMemoryError: for the marks, which says nothing of the places.
    """
    if not placed:
        return {}
    given = torch.zeros(len(placed), dtype=torch.int64, device=reader.device)
    of_name: dict[str, list[tuple[int, Held]]] = {}
    for number, held in enumerate(placed):
        of_name.setdefault(held.name, []).append((number, held))
    try:
        with torch.no_grad():
            for marks in _marks(sources, owners, model, reader.device):
                _hash_given(marks, of_name, reader, given)
                model.load_weights((mark.name, mark.tensor) for mark in marks)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's loader makes of random numbers
        why = f"a load of marks failed: {type(error).__name__}: {error}"
        return dict.fromkeys((source.name for source in sources), why)
    wrong = (given != _found(placed, reader)).nonzero().flatten().tolist()
    return {placed[number].name: ELSEWHERE for number in wrong}


def _found(placed: Sequence[Held], reader: Reader) -> torch.Tensor:
    """The hash of what lies at each place: int64 of shape ``(len(placed),)``."""
    found = torch.zeros(len(placed), dtype=torch.int64, device=reader.device)
    plain = [b for n, held in enumerate(placed) if not held.turned for b in _lies(held, n, reader.base(held))]
    reader.run(reader.copier.prepare(plain), found)
    for number, held in enumerate(placed):
        if held.turned:
            reader.add_turned(held, _lies(held, number, 0), found)
    return found


def _hash_given(
    marks: list[_Mark], of_name: Mapping[str, list[tuple[int, Held]]], reader: Reader, given: torch.Tensor
) -> None:
    """Adds the hashes of what is taken of some marks, before the model may write into them."""
    here = [(base, number, held) for base, mark in enumerate(marks) for number, held in of_name.get(mark.name, ())]
    dtypes = {held.name: held.dtype for _, _, held in here if held.ratio > 1}
    flats = [_as_kept(mark, dtypes.get(mark.name, mark.tensor.dtype)) for mark in marks]
    blocks = [block for base, number, held in here for block in _read(held, number, base)]
    reader.copier.prepare(blocks).run(memory_of(flats, reader.device), given, copy=False)


def _as_kept(mark: _Mark, dtype: torch.dtype) -> torch.Tensor:
    """All bytes of a mark, rounded where the model does so: uint8 of shape ``(n,)``."""
    same = mark.tensor.dtype == dtype
    return mark.flat if same else mark.flat.view(mark.tensor.dtype).to(dtype).view(torch.uint8)


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
) -> Iterator[list[_Mark]]:
    """All tensors as marks, in the chunks of ``_chunks``. Tied ones hold the same marks, in memory of their own, for
    some models write into what they are given. The random bits of a chunk are made at once: made one by one, those of
    18867 tensors took longer than their load."""
    generator = torch.Generator(device).manual_seed(SEED)
    for chunk in _chunks(sources, owners, model):
        metas = [source.meta() for source in chunk]
        sizes = [meta.untyped_storage().nbytes() for meta in metas]
        bits = _finite_bits(sum(map(_aligned, sizes)), generator)
        flats: dict[str, torch.Tensor] = {}
        marks, start = [], 0
        for source, meta, nbytes in zip(chunk, metas, sizes, strict=True):
            owner = owners.get(source.name, source.name)
            if owner in flats:
                flat = flats[owner].clone()
            elif source.dtype.is_floating_point:
                flat = flats[owner] = bits[start : start + nbytes]
            else:
                flat = flats[owner] = _whole_numbers(source, nbytes, generator)
            start += _aligned(nbytes)
            marks.append(_Mark(source.name, flat.view(source.dtype).as_strided(source.shape, meta.stride()), flat))
        yield marks


def _chunks(sources: Sequence[Source], owners: Mapping[str, str], model: EngineModel) -> Iterator[list[Source]]:
    """As many tensors in one go as make up ``CHUNK_BYTES``, each with those it is tied to or fused with."""
    by_name = {source.name: source for source in sources}
    tied: dict[str, list[str]] = {}
    for source in sources:
        tied.setdefault(owners.get(source.name, source.name), []).append(source.name)
    left = set(by_name)
    chunk: list[Source] = []
    nbytes = 0
    for first in by_name:
        together = [first] if first in left else []
        for name in together:  # grows on the way
            more = [*tied[owners.get(name, name)], partner_of(name, model.fused_pairs)]
            together += [each for each in more if each in left and each not in together]
        left.difference_update(together)
        chunk += [by_name[name] for name in together]
        nbytes += sum(by_name[name].nbytes for name in together)
        if nbytes >= CHUNK_BYTES:
            yield chunk
            chunk, nbytes = [], 0
    if chunk:
        yield chunk


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _finite_bits(nbytes: int, generator: torch.Generator) -> torch.Tensor:
    """Random bytes of shape ``(nbytes,)``, none of which is a part of a NaN or Inf of 16 or 32 bits."""
    halves = (nbytes // 2,)
    bits = torch.randint(-(1 << 15), 1 << 15, halves, generator=generator, device=generator.device, dtype=torch.int16)
    return bits.bitwise_and_(FINITE).view(torch.uint8)


def _whole_numbers(source: Source, nbytes: int, generator: torch.Generator) -> torch.Tensor:
    """Small whole numbers as bytes of shape ``(nbytes,)``."""
    most = 2 if source.dtype == torch.bool else 64
    shape = (nbytes // source.dtype.itemsize,)
    found = torch.randint(0, most, shape, generator=generator, device=generator.device)
    return found.to(source.dtype).view(torch.uint8)
