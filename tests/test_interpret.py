"""Triton's interpreter as we run it: right in every dtype, checked, and gone afterwards."""

import gc
import threading
import types
import weakref
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

import interpreter_kernels as kernels  # noqa: E402
import toys  # noqa: E402
from fusedops.kernels._interpret import InterpreterError, run_kernel, source  # noqa: E402

BF16 = np.dtype(ml_dtypes.bfloat16)
LOW = [BF16, np.dtype(np.float16)]
FP8 = [np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)]


def run(kernel, grid=1, **args):
    run_kernel(kernel, args, (grid, 1, 1) if isinstance(grid, int) else grid)


def normal(shape, dtype, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


class TestDtypes:
    @pytest.mark.parametrize("dtype", [*LOW, np.dtype(np.float32)], ids=str)
    @pytest.mark.parametrize("op", ["add", "mul", "sub", "max", "neg", "abs", "where"])
    def test_arithmetic_rounds_once(self, dtype, op):
        x, y = normal(64, dtype), normal(64, dtype, 1)
        out = np.full(64, np.nan, dtype)
        run(kernels.arithmetic_kernel, x_ptr=x, y_ptr=y, out_ptr=out, OP=op, BLOCK=64)
        a, b = x.astype(np.float64), y.astype(np.float64)
        want = dict(add=a + b, mul=a * b, sub=a - b, max=np.maximum(a, b), neg=-a, abs=abs(a))
        np.testing.assert_array_equal(out, want.get(op, np.maximum(a, b)).astype(dtype))

    @pytest.mark.parametrize("target", [*LOW, *FP8], ids=str)
    def test_casts_round_to_nearest_even(self, target):
        x = np.concatenate(
            [
                normal(200, np.float32),
                np.float32([0, -0.0, np.nan, 1 + 2**-8, 1 + 3 * 2**-8]),
                normal(51, np.float32, 2) * 50,
            ]
        )
        out = np.zeros(256, target)
        run(kernels.cast_kernel, x_ptr=x.astype(np.float32), out_ptr=out, BLOCK=256)
        np.testing.assert_array_equal(out.view(f"u{target.itemsize}"), x.astype(target).view(f"u{target.itemsize}"))

    @pytest.mark.parametrize("source", [*LOW, *FP8], ids=str)
    def test_widening_is_exact(self, source):
        x = normal(64, source)
        out = np.zeros(64, np.float32)
        run(kernels.cast_kernel, x_ptr=x, out_ptr=out, BLOCK=64)
        np.testing.assert_array_equal(out, x.astype(np.float32))

    @pytest.mark.parametrize(
        "pair", [(np.float32, np.int32), (np.int32, BF16), (np.int8, np.float16), (BF16, np.int32)]
    )
    def test_integers_and_floats(self, pair):
        x = (np.arange(16) - 8).astype(pair[0])
        out = np.zeros(16, pair[1])
        run(kernels.cast_kernel, x_ptr=x, out_ptr=out, BLOCK=16)
        np.testing.assert_array_equal(out, x.astype(np.float32).astype(pair[1]))

    @pytest.mark.parametrize("dtype", [*LOW, *FP8, np.dtype(np.float32)], ids=str)
    def test_dot_accumulates_in_float32(self, dtype):
        a, b = normal((16, 64), dtype), normal((64, 16), dtype, 1)
        out = np.zeros((16, 16), np.float32)
        run(toys.dot_kernel, a_ptr=a, b_ptr=b, out_ptr=out, M=16, K=64, N=16, PRECISION="ieee")
        np.testing.assert_allclose(out, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)

    def test_low_sums_round_in_a_tree(self):
        """A sum in sequence would stop at 256."""
        for dtype, want in ((BF16, 1024), (FP8[1], 1024)):
            out = np.zeros(1, dtype)
            run(kernels.low_sum_kernel, x_ptr=np.ones(1024, dtype), out_ptr=out, N=1024)
            assert out[0] == want

    @pytest.mark.parametrize("dtype", [*LOW, np.dtype(np.float32)], ids=str)
    def test_nan_in_minimum_and_maximum(self, dtype):
        x, y = np.array([np.nan, 1, -3, np.nan], dtype), np.array([2, np.nan, 4, np.nan], dtype)
        out = np.zeros((3, 4), dtype)
        run(kernels.minmax_kernel, x_ptr=x, y_ptr=y, out_ptr=out)
        want = [[2, 1, -3, np.nan], [np.nan, np.nan, 4, np.nan], [-1, 1, -1, -1]]
        np.testing.assert_array_equal(out.astype(np.float32), np.array(want, np.float32))

    @pytest.mark.parametrize("dtype", [*LOW, np.dtype(np.float32)], ids=str)
    def test_fma_rounds_once(self, dtype):
        x, y = (normal(256, dtype, seed) for seed in (0, 1))
        z = (-(x.astype(np.float64) * y.astype(np.float64)) * (1 + normal(256, np.float64, 2) * 1e-4)).astype(dtype)
        out = np.zeros(256, dtype)
        run(kernels.fma_kernel, x_ptr=x, y_ptr=y, z_ptr=z, out_ptr=out, N=256)
        exact = [Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)) for a, b, c in zip(x, y, z, strict=True)]
        down, up = np.nextafter(out, dtype.type(-np.inf)), np.nextafter(out, dtype.type(np.inf))
        for value, low, got, high in zip(exact, down, out, up, strict=True):
            error = abs(value - Fraction(float(got)))
            assert error <= abs(value - Fraction(float(low)))
            assert error <= abs(value - Fraction(float(high)))

    def test_fp8_saturates_and_rounds_toward_zero(self):
        """As the GPU's conversions do (PTX ISA, cvt, .satfinite)."""
        x = np.array([1e6, -1e6, np.inf, np.nan], np.float32)
        for dtype, most in ((FP8[0], 448), (FP8[1], 57344)):
            out = np.zeros(4, dtype)
            run(kernels.cast_kernel, x_ptr=x, out_ptr=out, BLOCK=4)
            np.testing.assert_array_equal(out.astype(np.float32), np.float32([most, -most, most, np.nan]))
        x, out = np.float32([1 + 2**-8 + 2**-9, -1 - 2**-8 - 2**-9, 3.4e38, 0.0]), np.zeros(4, BF16)
        run(kernels.toward_zero_kernel, x_ptr=x, out_ptr=out, N=4)
        np.testing.assert_array_equal(out, (x.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(BF16))

    @pytest.mark.parametrize("kind", ["b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f8"])
    def test_every_other_dtype(self, kind):
        x = (np.arange(16) % 3 - (kind[0] in "if")).astype(kind)
        out = np.zeros(16, kind)
        run(kernels.cast_kernel, x_ptr=x, out_ptr=out, BLOCK=16)
        np.testing.assert_array_equal(out, x)

    def test_integer_dot(self):
        a, b = (normal((16, 32), np.float32, s) * 20 for s in (0, 1))
        a, b = a.astype(np.int8), b.astype(np.int8).T.copy()
        out = np.zeros((16, 16), np.int32)
        run(toys.dot_kernel, a_ptr=a, b_ptr=b, out_ptr=out, M=16, K=32, N=16, PRECISION="ieee")
        np.testing.assert_array_equal(out, a.astype(np.int32) @ b.astype(np.int32))


class TestLanguage:
    def test_scans_and_reductions(self):
        x = normal(16, np.float32)
        out, reduced = np.zeros((4, 16), "f4"), np.zeros(5, "f4")
        run(kernels.scan_kernel, x_ptr=x, out_ptr=out, reduce_ptr=reduced, BLOCK=16)

        def decayed(values):
            total = [values[0]]
            for value in values[1:]:
                total.append(total[-1] * 0.5 + value)
            return np.array(total)

        want = [decayed(x), decayed(x[::-1])[::-1], np.cumsum(x), np.cumsum(x[::-1])[::-1]]
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
        want = [out[0, -1], x.sum(), x.argmax(), x.max(), x.min()]
        np.testing.assert_allclose(reduced, want, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("dtype", [*LOW, np.dtype(np.float32), np.dtype(np.int32)], ids=str)
    def test_reductions_over_an_axis(self, dtype):
        x = np.round(normal((8, 16), np.float32) * 4).astype(dtype)
        out = np.zeros(8 + 2 * 16, dtype)
        run(kernels.reduce_axes_kernel, x_ptr=x, out_ptr=out, M=8, N=16)
        w = x.astype(np.float32)
        np.testing.assert_array_equal(out.astype(np.float32), np.concatenate([w.sum(1), w.max(0), w.argmin(0)]))

    def test_shapes(self):
        x, out, counts = np.arange(32, dtype=np.float32), np.zeros((6, 32), np.float32), np.zeros(4, np.int32)
        run(kernels.shapes_kernel, x_ptr=x, out_ptr=out, count_ptr=counts)
        swapped = x.reshape(16, 2)[:, ::-1].reshape(-1)
        parts = np.concatenate([x[::2], x[1::2]])
        np.testing.assert_array_equal(out, [x.reshape(8, 4).T.ravel(), x[::-1], swapped, parts, x[::-1], x[::-1]])
        np.testing.assert_array_equal(counts, 4)

    @pytest.mark.parametrize("n", [2, 5])
    def test_logic_is_that_of_the_compiler(self, n):
        x, out = np.arange(8, dtype=np.int32), np.zeros(28, np.int32)
        run(kernels.logic_kernel, x_ptr=x, out_ptr=out, n=n, FLAG=True, NOTHING=None)
        np.testing.assert_array_equal(out[:8], (x > 1) & (x < 6))
        np.testing.assert_array_equal(out[8:16], x <= 1)
        np.testing.assert_array_equal(out[16:24], np.maximum(x, 3) + 2)
        assert out[24:].tolist() == [6 if n > 3 else 1, 5, (7 if n > 3 else 8) + 6, -(7 // n) * 10 - 7 % n]

    def test_map_elementwise(self):
        x, out = normal(8, np.float32), np.zeros(8, np.float32)
        run(kernels.elementwise_kernel, x_ptr=x, out_ptr=out, a=0.25, N=8)
        np.testing.assert_array_equal(out, np.where(x > 0, x, x * np.float32(0.25)))

    def test_integers_as_bits(self):
        x, out = np.array([-1, 5, 2**31 - 1, -(2**31)], np.int32), np.zeros((3, 4), np.uint32)
        run(kernels.bits_kernel, x_ptr=x, out_ptr=out)
        u = x.view(np.uint32)
        high = (u.astype(np.uint64) * 0xFFFFFFFF) >> np.uint64(32)
        np.testing.assert_array_equal(out, [u >> 4, (x >> 4).view(np.uint32), high])

    def test_scalars_take_their_declared_type(self):
        out = np.zeros(1, np.float64)
        run(kernels.annotated_kernel, number=7, flag=True, out_ptr=out)
        assert out[0] == 1

    def test_counter_of_64_bits(self):
        out = np.zeros(1, np.int64)
        run(kernels.wide_range_kernel, out_ptr=out, start=2**40)
        assert out[0] == 2**40 + 2

    def test_closures_and_printing(self, capsys):
        x = np.ones(2, np.float32)
        run(kernels.closed_over(3.0, toys.affine), x_ptr=x)
        assert x[0] == (0.5 * 4 + 3) * 3
        run(kernels.print_kernel, x_ptr=x)
        assert capsys.readouterr().out == "static 3\n(0, 0, 0) x =: [15.  1.]\n"

    def test_tuples_and_absent_operands(self):
        x, out = np.full(1, 4, np.float32), np.zeros(1, np.float32)
        run(kernels.pair_kernel, pair=kernels.Pair(x, 2), extra=None, out_ptr=out)
        assert out[0] == 6
        run(kernels.pair_kernel, pair=None, extra=(x, (5, None)), out_ptr=out)
        assert out[0] == 20

    def test_libdevice(self):
        x = normal(16, np.float32)
        x[3] = np.nan
        out = np.zeros((7, 16), np.float32)
        run(kernels.extern_kernel, x_ptr=x, out_ptr=out, N=16)
        a = abs(x)
        want = [np.expm1(x), np.exp(x), a**1.5, np.log1p(a), 1 / np.sqrt(a), x / np.float32(3), np.isnan(x)]
        np.testing.assert_allclose(out, want, rtol=1e-6)
        with pytest.raises(NotImplementedError, match="__nv_j0f has no interpreter"):
            run(kernels.bessel_kernel, x_ptr=x)

    @pytest.mark.parametrize("dtype", [*LOW, np.dtype(np.float32)], ids=str)
    def test_float_atomics(self, dtype):
        x, old, other = np.zeros(2, dtype), np.zeros(4, dtype), np.zeros(2, np.float32)
        run(kernels.low_atomic_kernel, x_ptr=x, old_ptr=old, half_ptr=other)
        assert x.tolist() == [3.0, 1.5]
        assert old[:3].tolist() == [0, 1.5, 0]
        assert other.tolist() == [2, 3]

    @pytest.mark.parametrize("padding", ["zero", "nan"])
    @pytest.mark.parametrize("dtype", [*LOW, np.dtype(np.float32)], ids=str)
    def test_host_descriptors(self, dtype, padding):
        x, out, rows = normal((5, 8), dtype), np.zeros((3, 8), dtype), np.zeros((4, 8), dtype)
        desc = lambda a: types.SimpleNamespace(
            base=a, shape=a.shape, strides=(8, 1), block_shape=[4, 8], padding=padding
        )
        run(kernels.descriptor_kernel, x_desc=desc(x), out_desc=desc(out), rows_ptr=rows, M=4, N=8)
        np.testing.assert_array_equal(out, x[2:] + x[2:])
        np.testing.assert_array_equal(rows[:3], x[2:])
        np.testing.assert_array_equal(
            rows[3].astype(np.float32), np.full(8, 0 if padding == "zero" else np.nan, np.float32)
        )

    def test_descriptor_gather(self):
        x, out = normal((8, 8), np.float32), np.zeros((8, 8), np.float32)
        desc = types.SimpleNamespace(base=x, shape=(8, 8), strides=(8, 1), block_shape=[1, 8], padding="zero")
        run(kernels.gather_kernel, x_desc=desc, out_ptr=out)
        np.testing.assert_array_equal(out, x[::-1])

    def test_scaled_dot(self):
        rng = np.random.default_rng(0)
        a = normal((32, 64), FP8[0])
        codes = rng.integers(0, 16, (64, 32))
        b = (codes[::2] | codes[1::2] << 4).astype(np.uint8)
        scales = [rng.integers(125, 130, (32, 2)).astype(np.uint8) for _ in range(2)]
        out = np.zeros((32, 32), np.float32)
        run(kernels.scaled_dot_kernel, a_ptr=a, as_ptr=scales[0], b_ptr=b, bs_ptr=scales[1], out_ptr=out)
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        fp4 = np.where(codes & 8, -1, 1) * table[codes & 7]
        x, y = (np.repeat(2.0 ** (s.astype(np.float64) - 127), 32, 1) for s in scales)
        np.testing.assert_allclose(out, (a.astype(np.float64) * x) @ (fp4 * y.T), rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("n", [0, 1, 5])
    def test_loops_and_branches(self, n):
        out = np.zeros(1, np.int32)
        run(kernels.loops_kernel, out_ptr=out, n=n, STEPS=3)
        total = 2 * sum(range(n)) + sum(range(0, n, 2)) + 3
        assert out[0] == (-total if total > 5 else total)

    def test_math_and_libdevice(self):
        x = normal(16, np.float32)
        out = np.zeros((8, 16), np.float32)
        run(kernels.math_kernel, x_ptr=x, out_ptr=out, BLOCK=16)
        e = np.exp(x - x.max())
        import math

        want = [
            np.exp(x), 1 / (1 + np.exp(-x)), np.tanh(x), [math.erf(v) for v in x], 1 / np.sqrt(x * x + 1),
            np.sort(x), e / e.sum(), x * x + x,
        ]  # fmt: skip
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)

    def test_random_numbers(self):
        out = np.zeros(1024, np.float32)
        run(kernels.random_kernel, out_ptr=out, seed=7, BLOCK=1024)
        assert 0.45 < out.mean() < 0.55 and out.min() >= 0 and out.max() < 1 and len(set(out.tolist())) > 1000

    @pytest.mark.parametrize(
        "kernel, extra", [(kernels.apply_kernel, {"FUNCTION": toys.affine}), (kernels.module_kernel, {})]
    )
    def test_helpers_from_everywhere(self, kernel, extra):
        x, out = normal(8, np.float32), np.zeros(8, np.float32)
        run(kernel, x_ptr=x, out_ptr=out, BLOCK=8, **extra)
        np.testing.assert_allclose(out, x * 2 + 3, rtol=1e-6)

    def test_atomics(self):
        count, low, high = (np.zeros(1, np.int32) for _ in range(3))
        run(kernels.atomics_kernel, 5, count_ptr=count, low_ptr=low, high_ptr=high)
        assert (count[0], low[0], high[0]) == (5, -3, 4)

    @pytest.mark.skipif(not hasattr(tl, "make_block_ptr"), reason="gone in newer Triton")
    def test_block_pointers(self):
        x, out = normal((5, 6), np.float32), np.zeros((5, 6), np.float32)
        try:
            run(kernels.block_pointer_kernel, x_ptr=x, out_ptr=out, M=5, N=6, BLOCK=8)
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
            run(kernels.assert_kernel, x_ptr=np.zeros(1), LIMIT=5)
        with pytest.raises(InterpreterError, match="inline assembly has no interpreter"):
            run(kernels.assembly_kernel, out_ptr=np.zeros(2, np.int32))

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

    def test_tables_of_triton_are_as_before(self):
        owners = [tl, tl.core, tl.math, tl.standard, tl.tensor, tl.constexpr, tl.dtype, triton.runtime.JITFunction]
        before = [dict(vars(owner)) for owner in owners]
        self.test_nothing_stays_patched()
        assert before == [dict(vars(owner)) for owner in owners]

    def test_only_the_code_is_kept(self):
        x, out = np.ones(8, np.float32), np.zeros(8, np.float32)
        run(toys.affine_kernel, x_ptr=x, out_ptr=out, N=8, BLOCK=8)
        assert toys.affine_kernel.fn in source._code
        gone = [weakref.ref(x), weakref.ref(out)]
        del x, out
        gc.collect()
        assert [ref() for ref in gone] == [None] * 2

    @pytest.mark.parametrize("write", [False, True])
    @pytest.mark.parametrize("other", ["after", "before"])
    def test_a_neighbour_is_out_of_bounds(self, write, other):
        """Even where the address belongs to another operand."""
        memory = np.zeros(16, np.float32)
        x, out = (memory[:8], memory[8:]) if other == "after" else (memory[8:], memory[:8])
        offset = 8 if other == "after" else -1
        with pytest.raises(InterpreterError, match=f"element {offset} of x_ptr, which has 8 elements"):
            run(kernels.neighbour_kernel, x_ptr=x, out_ptr=out, offset=offset, WRITE=write)
        with pytest.raises(InterpreterError, match="element 0 of x_ptr, which has 0 elements"):
            run(kernels.neighbour_kernel, x_ptr=memory[:0], out_ptr=np.zeros(1, "f4"), offset=0, WRITE=write)

    def test_what_the_compiler_refuses(self):
        with pytest.raises(InterpreterError, match=r"condition is a block of shape \[4\]"):
            run(kernels.block_condition_kernel, x_ptr=np.ones(4, np.float32))
        with pytest.raises(InterpreterError, match="3 is no multiple of 16"):
            run(kernels.promise_kernel, x_ptr=np.ones(1, np.int32), n=3)
        a = np.ones((16, 8), BF16)
        with pytest.raises(InterpreterError, match="K >= 16"):
            run(toys.dot_kernel, a_ptr=a, b_ptr=a, out_ptr=np.zeros((16, 16), "f4"), M=16, K=8, N=16, PRECISION="ieee")

    def test_errors_name_the_line_of_the_helper(self):
        with pytest.raises(InterpreterError, match="undefined_name") as raised:
            run(kernels.calls_bad_helper_kernel, x_ptr=np.ones(1, np.float32))
        assert "return y + undefined_name" in str(raised.value)
        assert isinstance(raised.value.__cause__, NameError)

    def test_unsupported_says_what(self):
        with pytest.raises(NotImplementedError, match="inline assembly"):
            run(kernels.assembly_kernel, out_ptr=np.zeros(2, np.int32))
        with pytest.raises(InterpreterError, match="no type for the dtype complex64"):
            run(kernels.assert_kernel, x_ptr=np.zeros(1, np.complex64), LIMIT=1)

    def test_gluon(self):
        from triton.experimental import gluon

        with pytest.raises(NotImplementedError, match="cast_kernel is a Gluon kernel"):
            run(gluon.jit(kernels.cast_kernel.fn), x_ptr=np.zeros(1), out_ptr=np.zeros(1), BLOCK=1)

    def test_threads(self):
        """Launches that fail and launches that do not, from several threads at once."""
        results: list[Any] = []

        def work(number):
            for _ in range(3):
                x, out = np.full(8, number, np.float32), np.zeros(8, np.float32)
                run(toys.affine_kernel, x_ptr=x, out_ptr=out, N=8, BLOCK=8)
                results.append((out == 2 * number + 3).all())
                with pytest.raises(InterpreterError, match="out of bounds"):
                    run(toys.affine_kernel, x_ptr=x, out_ptr=out, N=9, BLOCK=16)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == [True] * 12

    def test_a_thousand_programs_in_order(self):
        out = np.zeros(1000, np.int32)
        run(toys.program_kernel, grid=(10, 10, 10), out_ptr=out)
        x, y, z = np.indices((10, 10, 10))
        np.testing.assert_array_equal(out, (x * 100 + y * 10 + z).reshape(-1))
