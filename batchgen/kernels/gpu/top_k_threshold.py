"""Device functions that find the boundary of a row's first tokens by rank or by mass, without a sort.

The order of a row is (logit falling, id rising). A boundary `(value, last)` keeps the beginning of that order: a token
is kept if its logit is above `value`, or equals it and its id is at most `last`.

By rank, in two passes over the row:

1. `lane_maxima`: the ids are distributed over BLOCK lanes, and each lane keeps its largest logit.
2. The k-th largest of these is at most the k-th largest logit (k lanes have one each), and usually little below:
   `collect` writes the ids of all logits above it, and of the first k equal ones. For random logits these are about
   k + k^2/(2*BLOCK) ids, in the worst case (k-1)*ceil(V/BLOCK) + k.
3. `narrow` finds the boundary among these few, in registers, by bisection.

If they are more than CAPACITY, or k is above BLOCK, `boundary_in_row` bisects over the row instead, three pivots a
pass. Bisections run over the int32 keys of `ordered`, so they end at the exact logit, or earlier if a pivot happens to
separate exactly the requested tokens.

Rows must not contain not-a-numbers. Minus zero counts as zero. Scratch: CAPACITY int32 per program in global memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST_LOGIT = tl.constexpr(-(2**31) + 0x7FFFFF)
"""Key of -inf."""


@triton.jit
def load_logits(p_row, stride, ids, mask):
    """Logits of `ids` as float32, -inf where masked; minus zero becomes zero, so that equal logits have equal keys."""
    values = tl.load(p_row + ids.to(tl.int64) * stride, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(values == 0.0, 0.0, values)


@triton.jit
def ordered(values):
    """int32 keys with the order of the float32 `values`."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(keys):
    """float32 values of keys; the inverse of `ordered`."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def scaled(values, largest, temperature):
    """(logit - largest) / temperature, rounded as on the CPU, unlike Triton's plain division."""
    return tl.div_rn(values - largest, temperature)


@triton.jit
def inside(values, ids, value, last):
    """Whether tokens are kept by the boundary `(value, last)`; -inf never is."""
    return ((values > value) | ((values == value) & (ids <= last))) & (values > float("-inf"))


@triton.jit
def lane_maxima(p_row, stride, vocab, BLOCK: tl.constexpr, STAGES: tl.constexpr = 4):
    """One pass: lane i keeps the largest logit among ids i, i + BLOCK, i + 2*BLOCK, ...

    STAGES - 1 blocks are prefetched, which needs rows aligned to 16 bytes; use 1 for others.

    Returns:
        [BLOCK] float32 largest (-inf for lanes without ids), [BLOCK] int32 the lowest id that has it, and [BLOCK] int1
        whether the lane has a not-a-number.
    """
    o_lane = tl.arange(0, BLOCK)
    b_largest = tl.full([BLOCK], float("-inf"), tl.float32)
    b_id = o_lane
    b_nan = tl.zeros([BLOCK], tl.int1)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        ids = start + o_lane  # [BLOCK]
        values = load_logits(p_row, stride, ids, ids < vocab)  # [BLOCK]
        larger = values > b_largest
        b_id = tl.where(larger, ids, b_id)
        b_largest = tl.where(larger, values, b_largest)
        b_nan = b_nan | (values != values)
    return b_largest, b_id, b_nan


@triton.jit
def narrow(keys, weights, target):
    """Bisect in registers for the key at which the total weight of the keys from the largest down reaches `target`.

    Args:
        keys: [N] int32.
        weights: [N] int32 or float64, not negative; in total at least `target`.
        target: of the weights' type, above 0.

    Returns:
        `(pivot, above)`: the keys of at least `pivot` weigh `target` or more; those above `pivot` weigh `above`, which
        is less than `target`. If the keys of at least `pivot` weigh exactly `target`, `above` is 0.
    """
    low = tl.min(keys, axis=0)
    high = tl.max(keys, axis=0) + 1
    at_low = tl.sum(weights, axis=0)
    at_high = at_low - at_low
    while (high.to(tl.int64) - low.to(tl.int64) > 1) & (at_low != target):
        middle = (low & high) + ((low ^ high) >> 1)
        weight = tl.sum(tl.where(keys >= middle, weights, 0), axis=0)
        enough = weight >= target
        low = tl.where(enough, middle, low)
        at_low = tl.where(enough, weight, at_low)
        high = tl.where(enough, high, middle)
        at_high = tl.where(enough, at_high, weight)
    at_high = tl.where(at_low == target, at_high - at_high, at_high)
    return low, at_high


@triton.jit
def boundary_in_few(values, ids, mask, weights, target):
    """Boundary of the fewest tokens, in order, whose weight reaches `target`, among few tokens in registers.

    Args:
        values: [N] float32 logits.
        ids: [N] int32, rising where `mask` is set.
        mask: [N] int1.
        weights: [N] int32 or float64, 0 where masked; in total at least `target`. Equal logits have equal weights.
        target: of the weights' type, above 0.
    """
    keys = ordered(values)
    keys = tl.where(mask, keys, tl.min(tl.where(mask, keys, 0x7FFFFFFF), axis=0))
    pivot, above = narrow(keys, weights, target)
    same = (keys == pivot) & mask
    earlier = tl.cumsum(same.to(tl.int32), axis=0) - same.to(tl.int32)  # [N] equals with a lower id
    last = tl.max(tl.where(same & (above + earlier * weights < target), ids, -1), axis=0)
    return value_of(pivot), last


@triton.jit
def boundary_in_row(
    p_row, stride, vocab, target, largest, temperature, value, last, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Boundary of the fewest tokens whose weight reaches `target` in a whole row, in up to 17 passes.

    Weights are exp(x) in float64 if BY_MASS, else 1; tokens outside the boundary `(value, last)` have no weight.
    """
    o_lane = tl.arange(0, BLOCK)
    low = tl.full([], LOWEST_LOGIT, tl.int32)
    high = ordered(largest) + 1
    at_low = target - target - 1  # unknown, and not needed
    at_high = target - target
    while (high.to(tl.int64) - low.to(tl.int64) > 1) & (at_low != target):
        gap = high.to(tl.int64) - low.to(tl.int64)
        first = (low + (gap >> 2)).to(tl.int32)
        second = (low + (gap >> 1)).to(tl.int32)
        third = (low + ((3 * gap) >> 2)).to(tl.int32)
        at_first = target - target
        at_second = target - target
        at_third = target - target
        for start in range(0, vocab, BLOCK):
            ids = start + o_lane
            logits = load_logits(p_row, stride, ids, ids < vocab)
            keys = ordered(logits)
            if BY_MASS:
                weights = tl.exp(scaled(logits, largest, temperature)).to(tl.float64)
                weights = tl.where(inside(logits, ids, value, last), weights, 0.0)
            else:
                weights = (ids < vocab).to(tl.int32)
            at_first += tl.sum(tl.where(keys >= first, weights, 0), axis=0)
            at_second += tl.sum(tl.where(keys >= second, weights, 0), axis=0)
            at_third += tl.sum(tl.where(keys >= third, weights, 0), axis=0)
        if at_third >= target:
            low, at_low = third, at_third
        elif at_second >= target:
            low, at_low = second, at_second
            high, at_high = third, at_third
        elif (at_first >= target) | (first == low):
            low, at_low = first, at_first
            high, at_high = second, at_second
        else:
            high, at_high = first, at_first
    pivot = value_of(low)
    last_kept = tl.full([], -1, tl.int32)
    if at_low == target:
        last_kept = tl.full([], 0x7FFFFFFF, tl.int32)
    else:
        # Of the equal logits, those are kept that are preceded by less than the target.
        seen = tl.full([], 0, tl.int32)
        weight = tl.exp(scaled(pivot, largest, temperature)).to(tl.float64) if BY_MASS else target - target + 1
        for start in range(0, vocab, BLOCK):
            ids = start + o_lane
            logits = load_logits(p_row, stride, ids, ids < vocab)
            same = ((logits == pivot) & (ids < vocab)).to(tl.int32)
            earlier = seen + tl.cumsum(same, axis=0) - same
            kept = (same > 0) & (at_high + earlier * weight < target)
            last_kept = tl.maximum(last_kept, tl.max(tl.where(kept, ids, -1), axis=0))
            seen += tl.sum(same, axis=0)
    return pivot, last_kept


@triton.jit
def collect(
    p_row, stride, vocab, value, last, ties, p_ids, largest, temperature,
    WITH_MASS: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr, STAGES: tl.constexpr = 4,
):  # fmt: skip
    """One pass: write the ids above `value`, and the first `ties` of those equal to it up to `last`, in rising order.

    Returns the number of ids (those beyond CAPACITY are not written) and, if WITH_MASS, the sum of exp(x) over the
    whole row in float64, else 0. Ends with a barrier, after which the ids may be read.
    """
    o_lane = tl.arange(0, BLOCK)
    count_above = tl.full([], 0, tl.int32)
    count_same = tl.full([], 0, tl.int32)
    b_mass = tl.zeros([BLOCK], tl.float64)
    # Blocks are prefetched, except with masses, which need the registers.
    for start in tl.range(0, vocab, BLOCK, num_stages=1 if WITH_MASS else STAGES):
        ids = start + o_lane
        logits = load_logits(p_row, stride, ids, ids < vocab)
        if WITH_MASS:
            b_mass += tl.exp(scaled(logits, largest, temperature)).to(tl.float64)
        above = logits > value
        same = (logits == value) & (ids <= last) & (ids < vocab)
        both = above.to(tl.int32) + (same.to(tl.int32) << 16)  # two counts in one scan
        counts = tl.sum(both, axis=0)
        if counts > 0:
            running = tl.cumsum(both, axis=0)
            rank_same = count_same + (running >> 16)  # including this one
            place = count_above + (running & 0xFFFF) + tl.minimum(rank_same, ties) - 1
            kept = (above | (same & (rank_same <= ties))) & (place < CAPACITY)
            tl.store(p_ids + place, ids, mask=kept)
            count_above += counts & 0xFFFF
            count_same += counts >> 16
    tl.debug_barrier()
    return count_above + tl.minimum(count_same, ties), tl.sum(b_mass, axis=0)


@triton.jit
def boundary_of_rank(
    p_row, stride, vocab, k, b_largest, p_ids, BLOCK: tl.constexpr, CAPACITY: tl.constexpr, STAGES: tl.constexpr = 4
):
    """Boundary of the first k tokens of a row.

    Args:
        p_row: the row's first logit; float32, float16 or bfloat16.
        stride: between its logits.
        vocab: V.
        k: 1 to V.
        b_largest: [BLOCK] float32 of `lane_maxima`.
        p_ids: [CAPACITY] int32 scratch of this program.
        BLOCK: lanes; a power of 2, at most 2^14.
        CAPACITY: a power of 2.
        STAGES: of `lane_maxima`.

    Returns:
        `(value, last, count)`: the boundary, and the number of ids in `p_ids`, rising, the first k tokens among them; 0
        if these did not fit.

    """
    largest = tl.max(b_largest, axis=0)
    value = largest
    last = tl.full([], -1, tl.int32)
    count = tl.full([], 0, tl.int32)
    if k <= BLOCK:
        bound, _ = narrow(ordered(b_largest), tl.full([BLOCK], 1, tl.int32), k)
        count, _ = collect(
            p_row, stride, vocab, value_of(bound), vocab, k, p_ids, largest, 1.0, False, BLOCK, CAPACITY, STAGES
        )
    if (count > 0) & (count <= CAPACITY):
        o_few = tl.arange(0, CAPACITY)
        m_few = o_few < count
        ids = tl.load(p_ids + o_few, mask=m_few, other=0)
        logits = load_logits(p_row, stride, ids, m_few)
        value, last = boundary_in_few(logits, ids, m_few, m_few.to(tl.int32), k)
    else:
        count = tl.full([], 0, tl.int32)
        value, last = boundary_in_row(p_row, stride, vocab, k, largest, 1.0, value, last, False, BLOCK)
    return value, last, count
