# SPDX-License-Identifier: Apache-2.0
"""The table-driven Triton kernels: one program copies, casts, hashes and checks one row of a table, or quantizes it.

Imported only where it is used: Triton is not installed on every machine.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 4096  # lanes per step of a program
CAST_BLOCK = 2048  # when each lane reads 16 bytes and writes 8
WARPS = 16
# Of a program that only reads: with more to keep in registers, fewer of them wait for memory at a time
READ_BLOCK = 2048
READ_WARPS = 4


@triton.jit
def factors(word):  # type: ignore[no-untyped-def]
    """The same as ``plain.factors``, of 32 bits: a product of two such is one instruction of a GPU."""
    mixed = word.to(tl.uint32) * 0x9E3779B1 + 0x85EBCA6B
    square = mixed.to(tl.uint64) * mixed.to(tl.uint64)
    low = square.to(tl.uint32)
    high = (square >> 32).to(tl.uint32)
    return (low ^ high) | 1, ((low - high) ^ mixed) | 1


@triton.jit
def weighed(bits, word):  # type: ignore[no-untyped-def]
    """Words times the factors of their halves, as in ``plain.hash_block``."""
    for_lower, for_upper = factors(word)
    lower = bits.to(tl.uint32).to(tl.uint64) * for_lower.to(tl.uint64)
    upper = (bits >> 32).to(tl.uint32).to(tl.uint64) * for_upper.to(tl.uint64)
    return lower + upper


@triton.jit
def cast_lanes(single, at, mask, LANE: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 read and cast to the bits of bf16: one element per lane, or four joined to a word."""
    if LANE == 8:
        four = at[:, None] * 4 + tl.arange(0, 4)[None, :]
        parts = tl.load(single + four, mask=mask[:, None], other=0.0).to(tl.bfloat16).to(tl.int16, bitcast=True)
        shifts = (tl.arange(0, 4) * 16).to(tl.uint64)
        value = tl.sum((parts.to(tl.uint64) & 0xFFFF) << shifts[None, :], axis=1).to(tl.int64)
    else:
        value = tl.load(single + at, mask=mask, other=0.0).to(tl.bfloat16).to(tl.int16, bitcast=True)
    return value


@triton.jit
def placed(value, where, LANE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of the word that each lane belongs to, and the lane's bits in their place in it."""
    if LANE == 8:
        word = where
        bits = value.to(tl.uint64)
    elif LANE == 2:
        word = where // 4
        bits = (value.to(tl.uint64) & 0xFFFF) << ((where % 4) * 16).to(tl.uint64)
    else:
        word = where // 8
        bits = (value.to(tl.uint64) & 0xFF) << ((where % 8) * 8).to(tl.uint64)
    return word, bits


@triton.jit(do_not_specialize=["rows"])
def move_rows(  # type: ignore[no-untyped-def]
    wide,  # int64 (6, n): source, target, position of the first lane; strides of all three, in lanes
    narrow,  # int32 (4, n): region, group, lanes, lanes per run
    rows,
    bases,  # int64: the target address, then the source addresses
    sums,
    flags,  # one per group
    LANE: tl.constexpr,  # bytes written per lane: 8, 2 or 1; 8 also promises 16-byte alignment where it does not cast
    CAST: tl.constexpr,  # from fp32 to bf16; the hash is of what is written
    RUNS: tl.constexpr,  # rows have several runs
    COPY: tl.constexpr,
    EXPONENT: tl.constexpr,  # its bits in all elements of a word; 0 does not look for NaN and Inf
    LOWEST: tl.constexpr,  # the lowest of these bits in each element
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    source = tl.load(bases + 1 + tl.load(narrow + row)) + tl.load(wide + row)
    target = tl.load(bases) + tl.load(wide + rows + row)
    position = tl.load(wide + 2 * rows + row) // LANE
    lanes = tl.load(narrow + 2 * rows + row)
    PAIRS: tl.constexpr = LANE == 8 and not CAST
    if LANE == 8:
        # Hazard: Triton drops an alignment hint on an integer address, and accesses are half as wide
        write = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16 if PAIRS else 8)
        read = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    elif LANE == 2:
        write = target.to(tl.pointer_type(tl.int16))
        read = source.to(tl.pointer_type(tl.int16))
    else:
        write = target.to(tl.pointer_type(tl.int8))
        read = source.to(tl.pointer_type(tl.int8))
    single = source.to(tl.pointer_type(tl.float32))
    if LANE == 8:
        single = tl.multiple_of(single, 16)
    if RUNS:
        per_run = tl.load(narrow + 3 * rows + row)
        source_stride = tl.load(wide + 3 * rows + row)
        target_stride = tl.load(wide + 4 * rows + row)
        position_stride = tl.load(wide + 5 * rows + row)
    if PAIRS:
        lanes = tl.multiple_of(lanes, 2)
        if RUNS:
            per_run = tl.multiple_of(per_run, 2)
            source_stride = tl.multiple_of(source_stride, 2)
            target_stride = tl.multiple_of(target_stride, 2)
    total = tl.zeros((BLOCK,), dtype=tl.uint64)
    broken = tl.zeros((BLOCK,), dtype=tl.uint64)
    for begin in range(0, lanes, BLOCK):
        lane = begin + tl.arange(0, BLOCK)
        mask = lane < lanes
        if RUNS:
            run = lane // per_run
            column = lane - run * per_run
            at = run.to(tl.int64) * source_stride + column
            to = run.to(tl.int64) * target_stride + column
            where = position + run.to(tl.int64) * position_stride + column
        else:
            at = lane
            to = lane
            where = position + lane
        if CAST:
            value = cast_lanes(single, at, mask, LANE)
        else:
            value = tl.load(read + at, mask=mask, other=0)
        if COPY:
            tl.store(write + to, value, mask=mask)
        word, bits = placed(value, where, LANE)
        total += weighed(bits, word)
        if EXPONENT:
            # adding one to an exponent of ones only carries into the bit above it
            broken |= (bits & EXPONENT) + LOWEST
    group = tl.load(narrow + rows + row)
    tl.atomic_add(sums + group, tl.sum(total, 0).to(tl.int64))
    if EXPONENT:  # an ``if`` of its own, which is decided when the kernel is compiled  # noqa: SIM102
        if tl.sum(((broken & (EXPONENT + LOWEST)) != 0).to(tl.int32), 0) > 0:
            tl.store(flags + group, 1)


@triton.jit(do_not_specialize=["rows"])
def quantize_rows(  # type: ignore[no-untyped-def]
    table,  # int64 (12, n): region, first element, target, position; elements per line read and written; lines,
    # columns, columns of the block before them; region and number of the scale; group
    rows,
    bases,  # int64: the target address, then the source addresses, scales (fp32, one per block) among them
    sums,
    SOURCE: tl.constexpr,  # dtype of what is read
    CAST: tl.constexpr,  # dtype to which it is cast first
    HIGH: tl.constexpr,  # lines and columns of a block; a row lies in one line of blocks
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,  # all places, lines and columns are at multiples of 16 bytes, and rows begin a block
    DO: tl.constexpr,  # "measure": a scale becomes at least the largest magnitude; "write": what is read, divided by
    # it; "hash": only hashes what would be written, where elements read on one line have consecutive positions
):
    # Hazard: a program that both stored and hashed values stored two of eight wrong on an H200, and hashed them right
    # (triton-lang/triton#11111, on float8 that is used in two layouts)
    row = tl.program_id(0)
    source = tl.load(bases + 1 + tl.load(table + row)).to(tl.pointer_type(SOURCE)) + tl.load(table + rows + row)
    target = (tl.load(bases) + tl.load(table + 2 * rows + row)).to(tl.pointer_type(tl.float8e4nv))
    position = tl.load(table + 3 * rows + row)
    stride = tl.load(table + 4 * rows + row)
    target_stride = tl.load(table + 5 * rows + row)
    high = tl.load(table + 6 * rows + row)
    wide = tl.load(table + 7 * rows + row)
    before = tl.load(table + 8 * rows + row)
    scale = tl.load(bases + 1 + tl.load(table + 9 * rows + row)).to(tl.pointer_type(tl.float32))
    scale += tl.load(table + 10 * rows + row)
    if ALIGNED:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        stride = tl.multiple_of(stride, 16)
        target_stride = tl.multiple_of(target_stride, 16)
        wide = tl.multiple_of(wide, 16)
    line = tl.arange(0, HIGH)
    total = tl.zeros((HIGH, WIDE // 8 if ALIGNED else WIDE), dtype=tl.uint64)
    for block in range(0, tl.cdiv(before + wide, WIDE)):
        column = block * WIDE + tl.arange(0, WIDE)
        if not ALIGNED:
            column = column - before
        mask = (line < high)[:, None] & ((column >= 0) & (column < wide))[None, :]
        at = line[:, None] * stride + column[None, :]
        values = tl.load(source + at, mask=mask, other=0.0).to(CAST).to(tl.float32)
        if DO == "measure":
            found = tl.abs(values)
            found = tl.where(found < float("inf"), found, float("inf"))  # NaN, too
            tl.atomic_max(scale + block, tl.max(tl.max(found, 1), 0))
        else:
            made = tl.clamp(values * (1.0 / tl.load(scale + block)), -448.0, 448.0).to(tl.float8e4nv)
            if DO == "write":
                tl.store(target + line[:, None] * target_stride + column[None, :], made, mask=mask)
            else:  # outside of the mask are zeros, which add nothing
                word, bits = placed(made.to(tl.int8, bitcast=True), position + at, 1)
                if ALIGNED:
                    bits = tl.sum(tl.reshape(bits, (HIGH, WIDE // 8, 8)), 2)
                    eighth = block * (WIDE // 8) + tl.arange(0, WIDE // 8)
                    word = (position + line * stride)[:, None] // 8 + eighth[None, :]
                total += weighed(bits, word)
    if DO == "hash":
        group = tl.load(table + 11 * rows + row)
        tl.atomic_add(sums + group, tl.sum(tl.sum(total, 1), 0).to(tl.int64))


@triton.jit
def divide(largest, scales, inverse, count, least, most, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Divides as Triton does, which is not to the last bit as torch does: verl's kernel is Triton's."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.maximum(tl.load(largest + at, mask=at < count, other=1.0), least) / most
    tl.store(scales + at, scale, mask=at < count)
    tl.store(inverse + at, 1.0 / scale, mask=at < count)
