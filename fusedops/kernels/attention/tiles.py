"""What the attention kernels share: tiles of rows in and out of memory, and values that a mask must hide."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.constexpr_function
def block_of(size):
    """The extent of a tile that holds a head dim: a power of two, and at least 16 for tl.dot."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def load_rows(ptr, start, limit, stride, BLOCK_R: tl.constexpr, C: tl.constexpr, TAIL: tl.constexpr):
    """Rows [start, start + BLOCK_R) of C columns, as [BLOCK_R, block_of(C)]; zeros beyond the columns and,
    with TAIL, at rows from `limit` on."""
    BLOCK_C: tl.constexpr = block_of(C)
    offs_r, offs_c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    ptr += tl.cast(start, tl.int64) * stride
    ptrs = ptr + (offs_r[:, None] * stride + offs_c[None, :])
    if TAIL:
        mask = (start + offs_r < limit)[:, None]
        if C != BLOCK_C:
            mask = mask & (offs_c < C)[None, :]
        x = tl.load(ptrs, mask=mask, other=0.0)
    elif C != BLOCK_C:
        x = tl.load(ptrs, mask=(offs_c < C)[None, :], other=0.0)
    else:
        x = tl.load(ptrs)
    return x


@triton.jit
def store_rows(ptr, x, start, limit, stride, BLOCK_R: tl.constexpr, C: tl.constexpr):
    """The inverse of `load_rows`; rows from `limit` on are not written."""
    BLOCK_C: tl.constexpr = block_of(C)
    offs_r, offs_c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    ptr += tl.cast(start, tl.int64) * stride
    ptrs = ptr + (offs_r[:, None] * stride + offs_c[None, :])
    mask = (start + offs_r < limit)[:, None] & (offs_c < C)[None, :]
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def clean(x):
    """x with 0 for what is NaN or infinite, so that 0 * x is 0."""
    return tl.where(x - x == 0, x, 0.0).to(x.dtype)


@triton.jit
def has_bad(x):
    """Which rows of x have a NaN or an infinity."""
    return tl.max((x - x != 0).to(tl.int32), 1) > 0


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b.T, for a [M, C] and b [N, C]. In exact float32, sums of more than 64 terms are halved, as a running
    sum of all would lose more to rounding than plain JAX does."""
    M: tl.constexpr = a.shape[0]
    N: tl.constexpr = b.shape[0]
    C: tl.constexpr = a.shape[1]
    if PRECISION == "ieee" and a.dtype == tl.float32 and C > 64:
        a0, a1 = tl.split(tl.permute(tl.reshape(a, [M, 2, C // 2]), [0, 2, 1]))
        b0, b1 = tl.split(tl.permute(tl.reshape(b, [N, 2, C // 2]), [0, 2, 1]))
        return dot(a0, b0, PRECISION) + dot(a1, b1, PRECISION)
    else:
        return tl.dot(a, tl.trans(b), input_precision=PRECISION)


@triton.jit
def unit(scale, EXACT: tl.constexpr):
    """What logits are multiplied by for `exponential`: base 2 is cheaper, base e rounds once less and is for
    float32."""
    if EXACT:
        return scale
    else:
        return scale * LOG2E


@triton.jit
def exponential(x, EXACT: tl.constexpr):
    """exp of what `unit` scaled; to a unit in the last place with EXACT, for which tl.exp is too rough."""
    if EXACT:
        return libdevice.exp(x)
    else:
        return tl.exp2(x)


@triton.jit
def logsumexp(m, l, EXACT: tl.constexpr):
    """Natural logarithm of l times the exponential of m; -inf where l is 0."""
    lse = m + tl.log(l) if EXACT else (m + tl.log2(l)) * LN2
    return tl.where(l == 0, float("-inf"), lse)
