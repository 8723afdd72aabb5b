"""The table-driven Triton kernel: one program copies and hashes one row of the table.

Imported only where it is used: Triton is not installed on every machine.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 4096  # lanes per step of a program
WARPS = 16


@triton.jit
def factor(word):  # type: ignore[no-untyped-def]
    """The same factors as ``plain.factors``."""
    mixed = word.to(tl.uint64) * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D
    mixed = mixed ^ (mixed >> 32)
    mixed = mixed * 0xD6E8FEB86659FD93
    mixed = mixed ^ (mixed >> 32)
    return mixed | 1


@triton.jit
def weighed(bits, word):  # type: ignore[no-untyped-def]
    """The same as ``plain._weighed``, before the sum."""
    first = factor(word)
    return (bits & 0xFFFFFFFF) * first + (bits >> 32) * (first ^ 0x5851F42D4C957F2E)


@triton.jit(do_not_specialize=["rows"])
def copy_rows(  # type: ignore[no-untyped-def]
    wide,  # int64 (5, n): source, target, position of the first lane; strides of source and target, in lanes
    narrow,  # int32 (5, n): base, group, lanes, lanes per line, stride of the position in lanes
    rows,
    bases,  # int64: the target address, then the source addresses
    sums,
    LANE: tl.constexpr,  # bytes per lane: 8, 2 or 1; 8 also promises 16-byte alignment
    LINES: tl.constexpr,  # rows have several lines
    COPY: tl.constexpr,
    HASH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    source = tl.load(bases + 1 + tl.load(narrow + row)) + tl.load(wide + row)
    target = tl.load(bases) + tl.load(wide + rows + row)
    position = tl.load(wide + 2 * rows + row) // LANE
    lanes = tl.load(narrow + 2 * rows + row)
    if LANE == 8:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        lanes = tl.multiple_of(lanes, 2)
        read = source.to(tl.pointer_type(tl.int64))
        write = target.to(tl.pointer_type(tl.int64))
    elif LANE == 2:
        read = source.to(tl.pointer_type(tl.int16))
        write = target.to(tl.pointer_type(tl.int16))
    else:
        read = source.to(tl.pointer_type(tl.int8))
        write = target.to(tl.pointer_type(tl.int8))
    if LINES:
        per_line = tl.load(narrow + 3 * rows + row)
        source_stride = tl.load(wide + 3 * rows + row)
        target_stride = tl.load(wide + 4 * rows + row)
        position_stride = tl.load(narrow + 4 * rows + row)
        if LANE == 8:
            per_line = tl.multiple_of(per_line, 2)
            source_stride = tl.multiple_of(source_stride, 2)
            target_stride = tl.multiple_of(target_stride, 2)
    total = tl.zeros((BLOCK,), dtype=tl.uint64)
    for begin in range(0, lanes, BLOCK):
        lane = begin + tl.arange(0, BLOCK)
        mask = lane < lanes
        if LINES:
            line = lane // per_line
            column = lane - line * per_line
            value = tl.load(read + (line.to(tl.int64) * source_stride + column), mask=mask, other=0)
            if COPY:
                tl.store(write + (line.to(tl.int64) * target_stride + column), value, mask=mask)
            place = position + line.to(tl.int64) * position_stride + column
        else:
            value = tl.load(read + lane, mask=mask, other=0)
            if COPY:
                tl.store(write + lane, value, mask=mask)
            place = position + lane
        if HASH:
            if LANE == 8:
                word = place
                bits = value.to(tl.uint64)
            elif LANE == 2:
                word = place // 4
                bits = (value.to(tl.uint64) & 0xFFFF) << ((place % 4) * 16).to(tl.uint64)
            else:
                word = place // 8
                bits = (value.to(tl.uint64) & 0xFF) << ((place % 8) * 8).to(tl.uint64)
            total += weighed(bits, word)
    if HASH:
        group = tl.load(narrow + rows + row)
        tl.atomic_add(sums + group, tl.sum(total, 0).to(tl.int64))


@triton.jit(do_not_specialize=["rows"])
def cast_rows(  # type: ignore[no-untyped-def]
    wide,
    narrow,
    rows,
    bases,
    sums,
    ALIGNED: tl.constexpr,  # 16-byte addresses and lengths, so that a row is whole words
    HASH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Like ``copy_rows`` from fp32 to bf16; lanes are elements, the hash is of what is written."""
    row = tl.program_id(0)
    source = tl.load(bases + 1 + tl.load(narrow + row)) + tl.load(wide + row)
    target = tl.load(bases) + tl.load(wide + rows + row)
    position = tl.load(wide + 2 * rows + row) // 2
    lanes = tl.load(narrow + 2 * rows + row)
    if ALIGNED:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        lanes = tl.multiple_of(lanes, 8)
    read = source.to(tl.pointer_type(tl.float32))
    write = target.to(tl.pointer_type(tl.int16))
    total = tl.zeros((BLOCK,), dtype=tl.uint64)
    words = tl.zeros((BLOCK // 4,), dtype=tl.uint64)
    shifts = (tl.arange(0, 4) * 16).to(tl.uint64)
    for begin in range(0, lanes, BLOCK):
        lane = begin + tl.arange(0, BLOCK)
        mask = lane < lanes
        value = tl.load(read + lane, mask=mask, other=0.0).to(tl.bfloat16).to(tl.int16, bitcast=True)
        tl.store(write + lane, value, mask=mask)
        if HASH:
            bits = value.to(tl.uint64) & 0xFFFF
            if ALIGNED:
                # four elements are one word: a factor per word instead of one per element
                joined = tl.sum(tl.reshape(bits, (BLOCK // 4, 4)) << shifts[None, :], axis=1)
                words += weighed(joined, (position + begin) // 4 + tl.arange(0, BLOCK // 4))
            else:
                place = position + lane
                total += weighed(bits << ((place % 4) * 16).to(tl.uint64), place // 4)
    if HASH:
        group = tl.load(narrow + rows + row)
        tl.atomic_add(sums + group, (tl.sum(total, 0) + tl.sum(words, 0)).to(tl.int64))
