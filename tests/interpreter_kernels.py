"""Kernels that show one part of Triton's language each, for the tests of the interpreter."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.libdevice import expm1

import toys


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, OP: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + offs), tl.load(y_ptr + offs)
    if OP == "add":
        z = x + y
    elif OP == "mul":
        z = x * y
    elif OP == "sub":
        z = x - y
    elif OP == "max":
        z = tl.maximum(x, y)
    elif OP == "neg":
        z = -x
    elif OP == "abs":
        z = tl.abs(x)
    else:
        z = tl.where(x > y, x, y)
    tl.store(out_ptr + offs, z)


@triton.jit
def cast_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(out_ptr.dtype.element_ty))


@triton.jit
def combine(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def larger(a, b):
    if a > b:
        return a
    else:
        return b


@triton.jit
def scan_kernel(x_ptr, out_ptr, reduce_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    decay = tl.full((BLOCK,), 0.5, tl.float32)
    _, y = tl.associative_scan((decay, x), 0, combine)
    tl.store(out_ptr + offs, y)
    tl.store(out_ptr + BLOCK + offs, tl.associative_scan((decay, x), axis=0, combine_fn=combine, reverse=True)[1])
    tl.store(out_ptr + 2 * BLOCK + offs, tl.cumsum(x, 0))
    tl.store(out_ptr + 3 * BLOCK + offs, x.cumsum(0, reverse=True))
    tl.store(reduce_ptr, tl.reduce((decay, x), 0, combine)[1])
    tl.store(reduce_ptr + 1, tl.sum(x))
    tl.store(reduce_ptr + 2, tl.argmax(x, 0).to(tl.float32))
    tl.store(reduce_ptr + 3, tl.reduce(x, 0, larger))
    tl.store(reduce_ptr + 4, x.min(axis=0))


@triton.jit
def reduce_axes_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :])
    tl.store(out_ptr + m[:, None], tl.sum(x, 1, keep_dims=True))
    tl.store(out_ptr + M + n, x.max(0))
    tl.store(out_ptr + M + N + n, tl.argmin(x, axis=0).to(x.dtype))


@triton.jit
def shapes_kernel(x_ptr, out_ptr, count_ptr):
    x = tl.load(x_ptr + tl.arange(0, 8)[:, None] * 4 + tl.arange(0, 4)[None, :])  # [8, 4]
    flat = tl.arange(0, 32)
    tl.store(out_ptr + flat, tl.reshape(x.T, (32,)))
    tl.store(out_ptr + 32 + flat, tl.flip(tl.ravel(x), 0))
    a, b = tl.split(tl.reshape(x, (16, 2)))
    tl.store(out_ptr + 64 + flat, tl.interleave(b, a))
    tl.store(out_ptr + 96 + flat, tl.reshape(tl.permute(tl.join(a, b), (1, 0)), (32,)))
    tl.store(out_ptr + 128 + flat, tl.gather(tl.ravel(x), 31 - flat, 0))
    tl.store(out_ptr + 160 + flat, tl.sort(tl.ravel(x), descending=True))
    tl.store(count_ptr + tl.arange(0, 4), tl.histogram(tl.ravel(x).to(tl.int32) % 8, 4))


@triton.jit
def logic_kernel(x_ptr, out_ptr, n, FLAG: tl.constexpr, NOTHING: tl.constexpr):
    offs = tl.arange(0, 8)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, tl.where((x > 1) and (x < 6), 1, 0))
    tl.store(out_ptr + 8 + offs, tl.where(not (x > 1), 1, 0))
    tl.store(out_ptr + 16 + offs, max(x, 3) + min(n, 2))
    a, b = 1, 2.5
    if FLAG and NOTHING is None and n > 3:
        a += n.to(tl.int32)
    tl.store(out_ptr + 24, a.to(tl.int32))
    tl.store(out_ptr + 25, (b * 2).to(tl.int32))
    tl.store(out_ptr + 26, (7 if n > 3 else 8) + toys.SHIFT.value + (toys.SHIFT + n) - n)
    tl.store(out_ptr + 27, -7 // n.to(tl.int32) * 10 + -7 % n)


@triton.jit
def block_condition_kernel(x_ptr):
    if tl.load(x_ptr + tl.arange(0, 4)) > 0:
        tl.store(x_ptr, 1.0)


@triton.jit
def low_sum_kernel(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N))))


@triton.jit
def minmax_kernel(x_ptr, y_ptr, out_ptr):
    offs = tl.arange(0, 4)
    x, y = tl.load(x_ptr + offs), tl.load(y_ptr + offs)
    tl.store(out_ptr + offs, tl.minimum(x, y))
    tl.store(out_ptr + 4 + offs, tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out_ptr + 8 + offs, tl.clamp(x, -1.0, 1.0))


@triton.jit
def fma_kernel(x_ptr, y_ptr, z_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, tl.fma(tl.load(x_ptr + offs), tl.load(y_ptr + offs), tl.load(z_ptr + offs)))


@triton.jit
def toward_zero_kernel(x_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(tl.bfloat16, fp_downcast_rounding="rtz"))


@triton.jit
def bits_kernel(x_ptr, out_ptr):
    offs = tl.arange(0, 4)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, x.to(tl.uint32, bitcast=True) >> 4)
    tl.store(out_ptr + 4 + offs, (x >> 4).to(tl.uint32, bitcast=True))
    tl.store(out_ptr + 8 + offs, tl.umulhi(x.to(tl.uint32, bitcast=True), offs.to(tl.uint32) * 0 + 0xFFFFFFFF))


@triton.jit
def annotated_kernel(number: tl.int16, flag, out_ptr):
    types_check(number, flag)
    tl.store(out_ptr, out_ptr.dtype.element_ty == tl.float64)


@triton.jit
def types_check(number, flag):
    tl.static_assert(number.dtype == tl.int16)
    tl.static_assert(flag.dtype == tl.int1)


@triton.jit
def extern_kernel(x_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, expm1(x))
    tl.store(out_ptr + N + offs, libdevice.fast_expf(x))
    tl.store(out_ptr + 2 * N + offs, libdevice.pow(tl.abs(x), 1.5))
    tl.store(out_ptr + 3 * N + offs, libdevice.log1p(tl.abs(x)))
    tl.store(out_ptr + 4 * N + offs, libdevice.rsqrt(tl.abs(x)))
    tl.store(out_ptr + 5 * N + offs, libdevice.div_rn(x, 3.0))
    tl.store(out_ptr + 6 * N + offs, libdevice.isnan(x).to(tl.float32))


@triton.jit
def bessel_kernel(x_ptr):
    tl.store(x_ptr, libdevice.j0(tl.load(x_ptr)))


@triton.jit
def print_kernel(x_ptr):
    tl.static_print("static", 3)
    tl.device_print("x =", tl.load(x_ptr + tl.arange(0, 2)))
    tl.device_assert(tl.load(x_ptr) > 0, "positive")
    tl.assume(tl.load(x_ptr) > 0)
    tl.debug_barrier()


@triton.jit
def low_atomic_kernel(x_ptr, old_ptr, half_ptr):
    offs = tl.arange(0, 4)
    old = tl.atomic_add(x_ptr + offs // 2, tl.full((4,), 1.5, tl.float32).to(x_ptr.dtype.element_ty), mask=offs != 3)
    tl.store(old_ptr + offs, old)
    tl.atomic_xchg(half_ptr, 2.0)
    tl.atomic_cas(half_ptr + 1, 0.0, 3.0)


@triton.jit
def descriptor_kernel(x_desc, out_desc, rows_ptr, M: tl.constexpr, N: tl.constexpr):
    x = x_desc.load([2, 0])
    out_desc.atomic_add([0, 0], x)
    out_desc.atomic_add([0, 0], x)
    tl.store(rows_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], x)


@triton.jit
def gather_kernel(x_desc, out_ptr):
    offs = tl.arange(0, 8)
    x = x_desc.gather(7 - offs, 0)
    tl.store(out_ptr + offs[:, None] * 8 + offs[None, :], x)


@triton.jit
def scaled_dot_kernel(a_ptr, as_ptr, b_ptr, bs_ptr, out_ptr):
    m, k, s = tl.arange(0, 32), tl.arange(0, 64), tl.arange(0, 2)
    p = tl.arange(0, 32)
    a = tl.load(a_ptr + m[:, None] * 64 + k[None, :])
    b = tl.load(b_ptr + p[:, None] * 32 + m[None, :])
    a_scale = tl.load(as_ptr + m[:, None] * 2 + s[None, :])
    b_scale = tl.load(bs_ptr + m[:, None] * 2 + s[None, :])
    tl.store(out_ptr + m[:, None] * 32 + m[None, :], tl.dot_scaled(a, a_scale, "e4m3", b, b_scale, "e2m1"))


@triton.jit
def promise_kernel(x_ptr, n):
    n = tl.multiple_of(n, 16)
    tl.store(x_ptr, n)


@triton.jit
def neighbour_kernel(x_ptr, out_ptr, offset, WRITE: tl.constexpr):
    if WRITE:
        tl.store(x_ptr + offset, 1.0)
    else:
        tl.store(out_ptr, tl.load(x_ptr + offset))


@triton.jit
def pair_kernel(pair, extra, out_ptr):
    if extra is not None:
        tl.store(out_ptr, tl.load(extra[0]) * extra[1][0])
    else:
        tl.store(out_ptr, tl.load(pair.x) + pair.n)


@triton.jit
def wide_range_kernel(out_ptr, start):
    for i in range(start, start + 3, 2):
        tl.store(out_ptr, i)


@triton.jit
def selu_like(x, a):
    if x > 0:
        return x
    else:
        return a * x


@triton.jit
def elementwise_kernel(x_ptr, out_ptr, a, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, tl.map_elementwise(selu_like, x, a + x * 0))


@triton.jit
def bad_helper(x):
    y = x + 1
    return y + undefined_name  # noqa: F821


@triton.jit
def calls_bad_helper_kernel(x_ptr):
    tl.store(x_ptr, bad_helper(tl.load(x_ptr)))


def closed_over(factor: tl.constexpr, helper):
    @triton.jit
    def closure_kernel(x_ptr):
        tl.store(x_ptr, helper(tl.load(x_ptr)) * factor)

    return closure_kernel


class Pair(NamedTuple):
    x: Any
    n: Any


@triton.jit
def loops_kernel(out_ptr, n, STEPS: tl.constexpr):
    total = 0
    i = 0
    while i < n:
        total += i
        i += 1
    for j in range(n):
        total += j.to(tl.int32)
    for j in tl.range(0, n, 2):
        total += j
    for j in tl.static_range(STEPS):
        total += j
    if total > 5:
        total = -total
    tl.store(out_ptr, total)


@triton.jit
def math_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, tl.exp(x))
    tl.store(out_ptr + BLOCK + offs, tl.sigmoid(x))
    tl.store(out_ptr + 2 * BLOCK + offs, libdevice.tanh(x))
    tl.store(out_ptr + 3 * BLOCK + offs, tl.erf(x))
    tl.store(out_ptr + 4 * BLOCK + offs, tl.math.rsqrt(x * x + 1))
    tl.store(out_ptr + 5 * BLOCK + offs, tl.sort(x))
    tl.store(out_ptr + 6 * BLOCK + offs, tl.softmax(x))
    tl.store(out_ptr + 7 * BLOCK + offs, tl.fma(x, x, x))


@triton.jit
def random_kernel(out_ptr, seed, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.rand(seed, offs))


@triton.jit
def apply_kernel(x_ptr, out_ptr, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, FUNCTION(tl.load(x_ptr + offs)))


@triton.jit
def module_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, toys.affine(tl.load(x_ptr + offs)))


@triton.jit
def assembly_kernel(out_ptr):
    x = tl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [tl.arange(0, 2)], tl.int32, True, 1)
    tl.store(out_ptr + tl.arange(0, 2), x)


@triton.jit
def assert_kernel(x_ptr, LIMIT: tl.constexpr):
    tl.static_assert(LIMIT < 3, "too high")
    tl.store(x_ptr, 1)


@triton.jit
def atomics_kernel(count_ptr, low_ptr, high_ptr):
    tl.atomic_add(count_ptr, 1)
    tl.atomic_min(low_ptr, tl.program_id(0) - 3)
    tl.atomic_max(high_ptr, tl.program_id(0))


@triton.jit
def block_pointer_kernel(x_ptr, out_ptr, M, N, BLOCK: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (M, N), (N, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    out = tl.make_block_ptr(out_ptr, (M, N), (N, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    tl.store(out, tl.load(x, boundary_check=(0, 1)) * 2, boundary_check=(0, 1))
