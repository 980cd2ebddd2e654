"""Triton kernels of the loss scaler: one that reads all gradients once, one that ends an update.

Imports triton, so it is imported only where that is there (`one_pass`).
"""

# mypy: disable-error-code=no-untyped-def
from __future__ import annotations

import triton
import triton.language as tl


def _bits(place, start, BLOCK: tl.constexpr):
    """Magnitudes of a whole block of float32 as int32: without the sign bit they are ordered as the numbers are, NaN on top."""
    head = tl.multiple_of(place.to(tl.pointer_type(tl.int32)) + start, 16)  # so loads are wide
    return tl.load(head + tl.arange(0, BLOCK), eviction_policy="evict_first") & 0x7FFFFFFF


def _bits_within(place, start, low, high, BLOCK: tl.constexpr):
    """The same of the entries `low` up to `high` of a block, and 0 for the others."""
    index = tl.arange(0, BLOCK)
    head = place.to(tl.pointer_type(tl.int32)) + start
    return tl.load(head + index, mask=(index >= low) & (index < high), other=0) & 0x7FFFFFFF


def _bits_half(place, start, low, high, BFLOAT16: tl.constexpr, BLOCK: tl.constexpr):
    """The same of 16-bit numbers, as float32 has them: bfloat16 is its upper half."""
    index = tl.arange(0, BLOCK)
    inside = (index >= low) & (index < high)
    if BFLOAT16:
        head = place.to(tl.pointer_type(tl.int16)) + start
        return (tl.load(head + index, mask=inside, other=0).to(tl.int32) & 0x7FFF) << 16
    head = place.to(tl.pointer_type(tl.float16)) + start
    wide = tl.load(head + index, mask=inside, other=0.0).to(tl.float32)
    return wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF


bits = triton.jit(_bits)
bits_within = triton.jit(_bits_within)
bits_half = triton.jit(_bits_half)


def _flopwise_read_gradients(
    places, extents, spans, state, found, amax,
    count, blocks, look, MIXED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes found_inf and the largest magnitude of tensors; `tables` says what the tables are.

    Args:
        state: int32 [2], the maximum so far and how many programs are done: 0 before, and left 0 by the last one.
        count, blocks: of spans, and of blocks in each.
        look: 0 if the magnitude is to be 0, or inf where found_inf is 1.
        MIXED: whether some are not float32.
    """
    largest = tl.zeros([BLOCK], tl.int32)
    span = tl.program_id(0)
    while span < count:
        tensor = tl.load(spans + 2 * span)
        start = tl.load(spans + 2 * span + 1).to(tl.int64) * BLOCK
        place = tl.load(places + tensor)
        low = tl.load(extents + 3 * tensor)
        high = tl.load(extents + 3 * tensor + 1)
        code = tl.load(extents + 3 * tensor + 2)
        stop = tl.minimum(start + blocks * BLOCK, high)
        while start < stop:
            # of this block; the tensor may begin and end far outside of it
            begin = tl.maximum(low - start, 0).to(tl.int32)
            end = tl.minimum(high - start, BLOCK).to(tl.int32)
            if MIXED:
                if code == 0:
                    seen = bits_within(place, start, begin, end, BLOCK)
                elif code == 1:
                    seen = bits_half(place, start, begin, end, False, BLOCK)
                else:
                    seen = bits_half(place, start, begin, end, True, BLOCK)
            else:
                if (begin == 0) & (end == BLOCK):
                    seen = bits(place, start, BLOCK)
                else:
                    seen = bits_within(place, start, begin, end, BLOCK)
            largest = tl.maximum(largest, seen)
            start += BLOCK
        span += tl.num_programs(0)
    tl.atomic_max(state, tl.max(largest, axis=0))
    done = tl.atomic_add(state + 1, 1)
    if done == tl.num_programs(0) - 1:
        top = tl.atomic_xchg(state, 0)
        tl.atomic_xchg(state + 1, 0)
        infinity = 0x7F800000
        bad = top >= infinity
        told = tl.where(look != 0, top, tl.where(bad, infinity, 0))
        tl.store(found, tl.where(bad, 1.0, 0.0))
        tl.store(amax, told.to(tl.float32, bitcast=True))


def _flopwise_end_update(
    scale, tracker, found, amax, rows,
    row, growth, backoff, least, interval,
):  # fmt: skip
    """Writes the row of an update, and backs the scale off, or grows it, and keeps it from `least` on.

    The scale is what torch's `_amp_update_scale_` makes of it where it and the factors are powers of two.
    """
    now = tl.load(scale)
    clean = tl.load(tracker) + 1
    bad = tl.load(found) != 0.0
    tl.store(rows + 2 * row, tl.load(amax))
    tl.store(rows + 2 * row + 1, now)
    grows = clean == interval
    grown = now * growth
    grown = tl.where(grown < float("inf"), grown, now)
    after = tl.where(bad, now * backoff, tl.where(grows, grown, now))
    tl.store(tracker, tl.where(bad | grows, 0, clean))
    tl.store(scale, tl.maximum(after, least))


read = triton.jit(_flopwise_read_gradients, do_not_specialize=["count", "blocks", "look"])
end_update = triton.jit(_flopwise_end_update, do_not_specialize=["row", "interval"])
