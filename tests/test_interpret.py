"""Triton's interpreter as we run it: right in every dtype, checked, and gone afterwards."""

import ml_dtypes
import numpy as np
import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402

import toys  # noqa: E402
from fusedops.kernels import _interpret  # noqa: E402
from fusedops.kernels._interpret import InterpreterError, run_kernel  # noqa: E402

BF16 = np.dtype(ml_dtypes.bfloat16)
LOW = [BF16, np.dtype(np.float16)]
FP8 = [np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)]


def run(kernel, grid=1, **args):
    run_kernel(kernel, args, (grid, 1, 1) if isinstance(grid, int) else grid)


def normal(shape, dtype, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


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
def combine(a, b):
    return a * 0.5 + b


@triton.jit
def scan_kernel(x_ptr, scan_ptr, reduce_ptr, sum_ptr, arg_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(scan_ptr + offs, tl.associative_scan(x, 0, combine))
    tl.store(reduce_ptr, tl.reduce(x, 0, combine))
    tl.store(sum_ptr, tl.sum(x))
    tl.store(arg_ptr, tl.argmax(x, 0))


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


class TestDtypes:
    @pytest.mark.parametrize("dtype", [*LOW, np.dtype(np.float32)], ids=str)
    @pytest.mark.parametrize("op", ["add", "mul", "sub", "max", "neg", "abs", "where"])
    def test_arithmetic_rounds_once(self, dtype, op):
        x, y = normal(64, dtype), normal(64, dtype, 1)
        out = np.full(64, np.nan, dtype)
        run(arithmetic_kernel, x_ptr=x, y_ptr=y, out_ptr=out, OP=op, BLOCK=64)
        a, b = x.astype(np.float64), y.astype(np.float64)
        want = dict(add=a + b, mul=a * b, sub=a - b, max=np.maximum(a, b), neg=-a, abs=abs(a))
        np.testing.assert_array_equal(out, want.get(op, np.maximum(a, b)).astype(dtype))

    @pytest.mark.parametrize("target", [*LOW, *FP8], ids=str)
    def test_casts_round_to_nearest_even(self, target):
        x = np.concatenate([normal(200, np.float32), np.float32([0, -0.0, np.nan, 1 + 2**-8, 1 + 3 * 2**-8]), normal(51, np.float32, 2) * 50])
        out = np.zeros(256, target)
        run(cast_kernel, x_ptr=x.astype(np.float32), out_ptr=out, BLOCK=256)
        np.testing.assert_array_equal(out.view(f"u{target.itemsize}"), x.astype(target).view(f"u{target.itemsize}"))

    @pytest.mark.parametrize("source", [*LOW, *FP8], ids=str)
    def test_widening_is_exact(self, source):
        x = normal(64, source)
        out = np.zeros(64, np.float32)
        run(cast_kernel, x_ptr=x, out_ptr=out, BLOCK=64)
        np.testing.assert_array_equal(out, x.astype(np.float32))

    @pytest.mark.parametrize("pair", [(np.float32, np.int32), (np.int32, BF16), (np.int8, np.float16), (BF16, np.int32)])
    def test_integers_and_floats(self, pair):
        x = (np.arange(16) - 8).astype(pair[0])
        out = np.zeros(16, pair[1])
        run(cast_kernel, x_ptr=x, out_ptr=out, BLOCK=16)
        np.testing.assert_array_equal(out, x.astype(np.float32).astype(pair[1]))

    @pytest.mark.parametrize("dtype", [*LOW, *FP8, np.dtype(np.float32)], ids=str)
    def test_dot_accumulates_in_float32(self, dtype):
        a, b = normal((16, 64), dtype), normal((64, 16), dtype, 1)
        out = np.zeros((16, 16), np.float32)
        run(toys.dot_kernel, a_ptr=a, b_ptr=b, out_ptr=out, M=16, K=64, N=16, PRECISION="ieee")
        np.testing.assert_allclose(out, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)

    def test_integer_dot(self):
        a, b = (normal((16, 32), np.float32, s) * 20 for s in (0, 1))
        a, b = a.astype(np.int8), b.astype(np.int8).T.copy()
        out = np.zeros((16, 16), np.int32)
        run(toys.dot_kernel, a_ptr=a, b_ptr=b, out_ptr=out, M=16, K=32, N=16, PRECISION="ieee")
        np.testing.assert_array_equal(out, a.astype(np.int32) @ b.astype(np.int32))


class TestLanguage:
    def test_scans_and_reductions(self):
        x = normal(16, np.float32)
        scan, reduced, total, arg = np.zeros(16, "f4"), np.zeros(1, "f4"), np.zeros(1, "f4"), np.zeros(1, "i4")
        run(scan_kernel, x_ptr=x, scan_ptr=scan, reduce_ptr=reduced, sum_ptr=total, arg_ptr=arg, BLOCK=16)
        want, acc = [], None
        for value in x:
            acc = value if acc is None else np.float32(acc * np.float32(0.5) + value)
            want.append(acc)
        np.testing.assert_allclose(scan, want, rtol=1e-6)
        np.testing.assert_allclose(reduced[0], want[-1], rtol=1e-6)
        np.testing.assert_allclose(total[0], x.sum(), rtol=1e-5)
        assert arg[0] == x.argmax()

    @pytest.mark.parametrize("n", [0, 1, 5])
    def test_loops_and_branches(self, n):
        out = np.zeros(1, np.int32)
        run(loops_kernel, out_ptr=out, n=n, STEPS=3)
        total = 2 * sum(range(n)) + sum(range(0, n, 2)) + 3
        assert out[0] == (-total if total > 5 else total)

    def test_math_and_libdevice(self):
        x = normal(16, np.float32)
        out = np.zeros((8, 16), np.float32)
        run(math_kernel, x_ptr=x, out_ptr=out, BLOCK=16)
        e = np.exp(x - x.max())
        import math

        want = [
            np.exp(x), 1 / (1 + np.exp(-x)), np.tanh(x), [math.erf(v) for v in x], 1 / np.sqrt(x * x + 1),
            np.sort(x), e / e.sum(), x * x + x,
        ]  # fmt: skip
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)

    def test_random_numbers(self):
        out = np.zeros(1024, np.float32)
        run(random_kernel, out_ptr=out, seed=7, BLOCK=1024)
        assert 0.45 < out.mean() < 0.55 and 0 <= out.min() and out.max() < 1 and len(set(out.tolist())) > 1000

    @pytest.mark.parametrize("kernel, extra", [(apply_kernel, {"FUNCTION": toys.affine}), (module_kernel, {})])
    def test_helpers_from_everywhere(self, kernel, extra):
        x, out = normal(8, np.float32), np.zeros(8, np.float32)
        run(kernel, x_ptr=x, out_ptr=out, BLOCK=8, **extra)
        np.testing.assert_allclose(out, x * 2 + 3, rtol=1e-6)

    def test_atomics(self):
        count, low, high = (np.zeros(1, np.int32) for _ in range(3))
        run(atomics_kernel, 5, count_ptr=count, low_ptr=low, high_ptr=high)
        assert (count[0], low[0], high[0]) == (5, -3, 4)

    @pytest.mark.skipif(not hasattr(tl, "make_block_ptr"), reason="gone in newer Triton")
    def test_block_pointers(self):
        x, out = normal((5, 6), np.float32), np.zeros((5, 6), np.float32)
        try:
            run(block_pointer_kernel, x_ptr=x, out_ptr=out, M=5, N=6, BLOCK=8)
        except InterpreterError as error:
            if "make_block_ptr" in str(error):
                pytest.skip("this Triton has no block pointers")
            raise
        np.testing.assert_array_equal(out, x * 2)


class TestErrors:
    def test_out_of_bounds(self):
        x, out = np.ones(8, np.float32), np.zeros(8, np.float32)
        with pytest.raises(InterpreterError, match=r"affine_kernel, .*toys.py:\d+, program \(1, 0, 0\)"):
            run(toys.affine_kernel, 2, x_ptr=x, out_ptr=out, N=100, BLOCK=8)
        with pytest.raises(InterpreterError, match=r"load out of bounds: element \d+ of \w+, which has 8 elements"):
            run(toys.affine_kernel, 1, x_ptr=x, out_ptr=out, N=100, BLOCK=16)

    def test_store_into_an_input(self):
        x = np.ones(8, np.float32)
        x.flags.writeable = False
        with pytest.raises(InterpreterError, match="store to x_ptr, an input"):
            run(toys.increment_kernel, x_ptr=x, N=8, BLOCK=8)

    def test_assertions_and_assembly(self):
        with pytest.raises(InterpreterError, match="too high"):
            run(assert_kernel, x_ptr=np.zeros(1), LIMIT=5)
        with pytest.raises(InterpreterError, match="inline assembly has no interpreter"):
            run(assembly_kernel, out_ptr=np.zeros(2, np.int32))

    def test_nothing_stays_patched(self):
        before = {name: getattr(tl, name) for name in ("load", "range", "reduce", "static_assert", "dot")}
        names = set(toys.add_kernel.fn.__globals__)
        call = triton.runtime.JITFunction.__call__
        for good in (True, False):
            out = np.zeros(8 if good else 1, np.float32)
            try:
                run(toys.affine_kernel, x_ptr=np.ones(8, np.float32), out_ptr=out, N=8, BLOCK=8)
            except InterpreterError:
                assert not good
            assert all(getattr(tl, name) is value for name, value in before.items())
            assert set(toys.add_kernel.fn.__globals__) == names
            assert triton.runtime.JITFunction.__call__ is call
        with pytest.raises(RuntimeError, match="outside of the scope"):
            toys.half(1.0)

    def test_rewritten_code_is_kept_without_the_arrays(self):
        run(toys.affine_kernel, x_ptr=np.ones(8, np.float32), out_ptr=np.zeros(8, np.float32), N=8, BLOCK=8)
        assert toys.affine_kernel.fn in _interpret._code
