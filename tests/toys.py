"""Small kernels that the tests of the core launch."""

import triton
import triton.language as tl

SHIFT = tl.constexpr(3)


@triton.jit
def add_kernel(x_ptr, y_ptr, length, output_ptr, block_size: tl.constexpr):
    pid = tl.program_id(axis=0)
    offs = pid * block_size + tl.arange(0, block_size)
    mask = offs < length
    x = tl.load(x_ptr + offs, mask=mask)
    y = tl.load(y_ptr + offs, mask=mask)
    tl.store(output_ptr + offs, x + y, mask=mask)


@triton.jit
def half(x):
    return x * 0.5


@triton.jit
def affine(x):
    return half(x) * 4 + SHIFT


@triton.jit
def affine_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, affine(tl.load(x_ptr + offs, mask=offs < N)), mask=offs < N)


@triton.jit
def scale_kernel(x_ptr, factor, out_ptr, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N).to(tl.float32)
    tl.store(out_ptr + offs, x * factor.to(tl.float32), mask=offs < N)


@triton.jit
def scalar_kernel(value, out_ptr, KIND: tl.constexpr):
    tl.static_assert(KIND == "int" or KIND == "float")
    if KIND == "int":
        tl.store(out_ptr, (value >> 7).to(tl.int32))
        tl.store(out_ptr + 1, (value & 127).to(tl.int32))
    else:
        tl.store(out_ptr, value)


@triton.jit
def middle_kernel(x_ptr, out_ptr, y_ptr, sum_ptr, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0.0)
    y = tl.load(y_ptr + offs, mask=offs < N, other=0.0)
    tl.store(out_ptr + offs, x - y, mask=offs < N)
    tl.store(sum_ptr, tl.sum(x + 2 * y))


@triton.jit
def optional_kernel(x_ptr, bias_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + offs)
    tl.store(out_ptr + offs, x)


@triton.jit
def tuple_kernel(pair, numbers, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(pair[0] + offs) * numbers[0] + tl.load(pair[1] + offs) * numbers[1]
    tl.store(out_ptr + offs, x)


@triton.jit
def accumulate_kernel(x_ptr, total_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0.0)
    tl.atomic_add(total_ptr, tl.sum(x))


@triton.jit
def increment_kernel(x_ptr, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.load(x_ptr + offs, mask=offs < N) + 1, mask=offs < N)


@triton.jit
def two_outputs_kernel(x_ptr, y_ptr, a_ptr, b_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, x * 2)
    tl.store(a_ptr + offs, x + 1)
    tl.store(b_ptr + offs, x.to(tl.int32))


@triton.jit
def program_kernel(out_ptr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    tl.store(out_ptr + place, x * 100 + y * 10 + z)


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, input_precision=PRECISION))


@triton.jit
def copy_kernel(x_desc, y_desc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m, n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    y_desc.store([m, n], x_desc.load([m, n]) * 2)


@triton.jit
def device_descriptor_kernel(x_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    x_desc = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    y_desc = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    m, n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    y_desc.store([m, n], x_desc.load([m, n]) + 1)


@triton.jit
def reduce_kernel(x_ptr, total_desc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK_M * BLOCK_N + m[:, None] * BLOCK_N + n[None, :])
    total_desc.atomic_add([0, 0], x)


@triton.jit
def broken_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs) + undefined_name)  # noqa: F821


@triton.jit
def hungry_kernel(a_ptr, b_ptr, out_ptr, K, M: tl.constexpr, BK: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, BK), tl.arange(0, N)
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BK):
        a = tl.load(a_ptr + m[:, None] * K + start + k[None, :])
        b = tl.load(b_ptr + (start + k)[:, None] * N + n[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc)


@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128}, num_warps=2)], key=["N"])
@triton.heuristics({"EVEN": lambda values: values["N"] % values["BLOCK"] == 0})
@triton.jit
def tuned_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < (tl.num_programs(0) * BLOCK if EVEN else N)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=mask) * 3, mask=mask)


@triton.jit(do_not_specialize=["N"])
def unspecialized_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < N.to(tl.int64)), mask=offs < N)


@triton.jit
def short_scalar_kernel(value: tl.int16, out_ptr):
    tl.store(out_ptr, value.to(tl.float32))


@triton.jit
def flag_kernel(flag, out_ptr):
    tl.store(out_ptr, tl.where(flag, 5, 3))
