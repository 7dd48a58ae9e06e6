"""triton_call: operands, rules and errors, on toy kernels; through the interpreter where there is no GPU."""

import contextlib
import re
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusedops
import toys
from fusedops import TensorDescriptor, triton_call

HAS_GPU = jax.default_backend() == "gpu"
sds = jax.ShapeDtypeStruct


def like(x):
    return sds(x.shape, x.dtype)


@pytest.fixture(autouse=True)
def on_device():
    with contextlib.nullcontext() if HAS_GPU else fusedops.interpret():
        yield


def add(x, y):
    return triton_call(
        x, y, x.size, kernel=toys.add_kernel, out_shape=like(x), grid=(x.size // 8,), block_size=8
    )  # fmt: skip


def affine(x, block=32):
    n = x.size
    return triton_call(x, N=n, kernel=toys.affine_kernel, out_type=like(x), grid=-(-n // block), BLOCK=block)


class TestOperands:
    def test_classic_vector_add(self):
        x, y = jnp.arange(8), jnp.arange(8, 16)
        np.testing.assert_array_equal(add(x, y), x + y)
        np.testing.assert_array_equal(jax.jit(add)(x, y), x + y)

    @pytest.mark.parametrize(
        "dtype",
        ["float32", "float16", "bfloat16", "int8", "int16", "int32", "uint8", "uint32"],
    )
    def test_dtypes(self, dtype):
        x = jnp.arange(24).astype(dtype)
        np.testing.assert_array_equal(add(x, x), x + x)

    def test_64_bit(self):
        with jax.enable_x64(True):
            for dtype in ("float64", "int64", "uint64"):
                x = (jnp.arange(16) * 3).astype(dtype)
                result = add(x, x)
                assert result.dtype == x.dtype
                np.testing.assert_array_equal(result, x + x)

    def test_numpy_operand(self):
        x = np.arange(8, dtype=np.float32)
        np.testing.assert_array_equal(add(x, x), x + x)

    def test_by_name_and_in_any_order(self):
        x, y = jnp.arange(5.0), jnp.arange(5.0) * 3
        out, total = triton_call(
            x, y_ptr=y, N=5, kernel=toys.middle_kernel, grid=1, BLOCK=8,
            out_type=(like(x), sds((), jnp.float32)),
        )  # fmt: skip
        np.testing.assert_allclose(out, x - y)
        np.testing.assert_allclose(total, jnp.sum(x + 2 * y))

    def test_outputs_keep_their_structure(self):
        x = jnp.arange(4.0)
        out = triton_call(
            x, kernel=toys.two_outputs_kernel, grid=1, BLOCK=4,
            out_type={"doubled": like(x), "rest": [like(x), sds((4,), jnp.int32)]},
        )  # fmt: skip
        np.testing.assert_array_equal(out["doubled"], x * 2)
        np.testing.assert_array_equal(out["rest"][0], x + 1)
        np.testing.assert_array_equal(out["rest"][1], jnp.arange(4))

    @pytest.mark.parametrize("n", [1, 2, 16, 17])
    def test_every_small_length(self, n):
        x = jnp.arange(1.0, n + 1)
        result = triton_call(x, n, kernel=toys.scale_kernel, out_type=like(x), N=n, grid=1, BLOCK=32)
        np.testing.assert_allclose(result, x * n)
        y = triton_call(x, N=n, kernel=toys.unspecialized_kernel, out_type=like(x), grid=1, BLOCK=32)
        np.testing.assert_array_equal(y, x)

    @pytest.mark.parametrize(
        "value",
        [0, 1, 2, 16, 17, -5, 2**31 - 1, 2**31, 2**33 + 5, np.int8(-3), np.int64(2**40), np.uint32(7)],
    )
    def test_integer_scalars(self, value):
        value_out = np.int64(int(value) >> 7).astype(np.int32), int(value) & 127
        result = triton_call(value, kernel=toys.scalar_kernel, out_type=sds((2,), jnp.int32), grid=1, KIND="int")
        np.testing.assert_array_equal(result, value_out)

    @pytest.mark.parametrize("value", [True, False, np.bool_(True)])
    def test_bools(self, value):
        result = triton_call(value, kernel=toys.flag_kernel, out_type=sds((1,), jnp.int32), grid=1)
        assert int(result[0]) == (5 if value else 3)

    @pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 1.5, 1e30, float("inf"), np.float32(0.1), np.float16(3)])
    def test_float_scalars(self, value):
        result = triton_call(value, kernel=toys.scalar_kernel, out_type=sds((1,), jnp.float32), grid=1, KIND="float")
        np.testing.assert_array_equal(result[0], np.float32(value))

    def test_optional_pointer(self):
        x = jnp.arange(4.0)

        def call(bias):
            return triton_call(x, bias, kernel=toys.optional_kernel, out_type=like(x), grid=1, BLOCK=4)

        np.testing.assert_array_equal(call(None), x)
        np.testing.assert_array_equal(call(x * 10), x * 11)
        np.testing.assert_array_equal(call(None), x)

    def test_tuples(self):
        class Pair(NamedTuple):
            first: jax.Array
            second: jax.Array

        x, y = jnp.arange(4.0), jnp.arange(4.0) + 10
        for pair in ((x, y), [x, y], Pair(x, y)):
            result = triton_call(pair, (3, 1), kernel=toys.tuple_kernel, out_type=like(x), grid=1, BLOCK=4)
            np.testing.assert_allclose(result, 3 * x + y)

    def test_helpers_and_global_constants(self):
        x = jnp.arange(77.0)
        np.testing.assert_allclose(affine(x), x * 2 + 3)

    def test_operands_in_other_layouts(self):
        x = jnp.arange(24.0).reshape(4, 6)

        @jax.jit
        def run(x):
            return affine(x.T), affine(x[:, ::2]), affine(x[1:, 1:])

        for got, want in zip(run(x), (x.T, x[:, ::2], x[1:, 1:]), strict=True):
            np.testing.assert_allclose(got, want * 2 + 3)

    def test_three_axes_of_programs(self):
        out = triton_call(kernel=toys.program_kernel, out_type=sds((2, 3, 4), jnp.int32), grid=(2, 3, 4))
        want = [[[x * 100 + y * 10 + z for z in range(4)] for y in range(3)] for x in range(2)]
        np.testing.assert_array_equal(out, want)

    def test_grid_from_metaparameters(self):
        x = jnp.arange(64.0)
        out = triton_call(
            x, N=64, kernel=toys.affine_kernel, out_type=like(x), grid=lambda meta: (64 // meta["BLOCK"],), BLOCK=16
        )
        np.testing.assert_allclose(out, x * 2 + 3)

    def test_nothing_to_do(self):
        x = jnp.zeros((0,))
        assert affine(x).shape == (0,)
        x = jnp.arange(3.0)
        out = triton_call(x, N=3, kernel=toys.affine_kernel, out_type=like(x), grid=0, BLOCK=16)
        np.testing.assert_array_equal(out, jnp.zeros(3))

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_dot(self, dtype):
        a = jax.random.normal(jax.random.key(0), (16, 32)).astype(dtype)
        b = jax.random.normal(jax.random.key(1), (32, 16)).astype(dtype)
        out = triton_call(
            a, b, kernel=toys.dot_kernel, out_type=sds((16, 16), jnp.float32), grid=1, M=16, K=32, N=16,
            PRECISION="ieee",
        )  # fmt: skip
        want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)

    def test_fp8(self):
        for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
            x = jnp.array([0.5, -1.5, 3.0, 0.0], dtype)
            out = triton_call(x, 2, kernel=toys.scale_kernel, out_type=sds((4,), jnp.float32), N=4, grid=1, BLOCK=4)
            np.testing.assert_array_equal(out, np.asarray(x, np.float32) * 2)


class TestMemory:
    def test_alias(self):
        x = jnp.arange(6.0)

        def bump(x):
            return triton_call(
                x, N=6, kernel=toys.increment_kernel, out_type=like(x), grid=1, BLOCK=8, input_output_aliases={0: 0}
            )

        for run in (bump, jax.jit(bump), jax.jit(lambda x: bump(x) + 0 * x)):
            np.testing.assert_array_equal(run(x), jnp.arange(6.0) + 1)
            np.testing.assert_array_equal(x, jnp.arange(6.0))  # an operand that is still needed is copied

    def test_alias_among_other_outputs(self):
        x, y = jnp.arange(4.0), jnp.full(4, 7.0)
        outs = triton_call(
            x, y, kernel=toys.two_outputs_kernel, grid=1, BLOCK=4, input_output_aliases={1: 0},
            out_type=(like(y), like(x), sds((4,), jnp.int32)),
        )  # fmt: skip
        for got, want in zip(outs, (x * 2, x + 1, jnp.arange(4)), strict=True):
            np.testing.assert_array_equal(got, want)

    def test_donation(self):
        def bump(x):
            return triton_call(
                x, N=6, kernel=toys.increment_kernel, out_type=like(x), grid=1, BLOCK=8, input_output_aliases={0: 0}
            )

        out = jax.jit(bump, donate_argnums=0)(jnp.arange(6.0))
        np.testing.assert_array_equal(out, jnp.arange(6.0) + 1)

    def test_ref_is_updated_in_place(self):
        @jax.jit
        def run(x):
            ref = jax.new_ref(x)
            triton_call(ref, N=6, kernel=toys.increment_kernel, out_type=(), grid=1, BLOCK=8)
            triton_call(ref, N=6, kernel=toys.increment_kernel, out_type=(), grid=1, BLOCK=8)
            return ref[...]

        np.testing.assert_array_equal(run(jnp.arange(6.0)), jnp.arange(6.0) + 2)
        ref = jax.new_ref(jnp.arange(6.0))
        triton_call(ref, N=6, kernel=toys.increment_kernel, out_type=(), grid=1, BLOCK=8)
        np.testing.assert_array_equal(ref[...], jnp.arange(6.0) + 1)

    def test_zeroed_output(self):
        x = jnp.ones(100)
        for zeroed in ((0,), lambda meta: [0]):
            out = triton_call(
                x, N=100, kernel=toys.accumulate_kernel, out_type=sds((1,), jnp.float32), grid=(7,), BLOCK=16,
                zeroed_outputs=zeroed,
            )  # fmt: skip
            np.testing.assert_allclose(out, [100.0])

    @pytest.mark.skipif(HAS_GPU, reason="the GPU hands over whatever was in memory")
    def test_outputs_start_as_nan(self):
        x = jnp.ones(4)
        out = triton_call(x, N=2, kernel=toys.affine_kernel, out_type=like(x), grid=1, BLOCK=4)
        assert np.isnan(out[2:]).all() and not np.isnan(out[:2]).any()


class TestDescriptors:
    def test_host_descriptors(self):
        x = jax.random.normal(jax.random.key(0), (40, 64), jnp.float32)
        out = triton_call(
            TensorDescriptor.from_array(x, (16, 32)), kernel=toys.copy_kernel, grid=(3, 2), BLOCK_M=16, BLOCK_N=32,
            out_type=TensorDescriptor.from_array(like(x), (16, 32)),
        )  # fmt: skip
        np.testing.assert_array_equal(out, x * 2)

    def test_another_view_of_the_array(self):
        x = jax.random.normal(jax.random.key(0), (4, 8, 32), jnp.float32)
        view = dict(shape=(32, 32), strides=(32, 1), block_shape=(16, 32))
        out = triton_call(
            TensorDescriptor(x, **view), kernel=toys.copy_kernel, grid=(2, 1), BLOCK_M=16, BLOCK_N=32,
            out_type=TensorDescriptor(like(x), **view),
        )  # fmt: skip
        np.testing.assert_array_equal(out, x * 2)

    def test_device_descriptors(self):
        x = jax.random.normal(jax.random.key(0), (40, 64), jnp.float32)
        out = triton_call(
            x, M=40, N=64, kernel=toys.device_descriptor_kernel, out_type=like(x), grid=(3, 2), BLOCK_M=16, BLOCK_N=32
        )
        np.testing.assert_array_equal(out, x + 1)

    def test_reduction_into_an_aliased_array(self):
        x = jax.random.normal(jax.random.key(0), (5, 16, 32), jnp.float32)
        start = jnp.ones((16, 32))
        out = triton_call(
            x, TensorDescriptor.from_array(start, (16, 32)), kernel=toys.reduce_kernel, out_type=like(start),
            grid=5, BLOCK_M=16, BLOCK_N=32, input_output_aliases={1: 0},
        )  # fmt: skip
        np.testing.assert_allclose(out, 1 + x.sum(0), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        "fields, words",
        [
            (dict(strides=(32, 2)), "last stride must be 1"),
            (dict(strides=(30, 1)), "multiples of 16 bytes"),
            (dict(shape=(41, 32)), "beyond the array"),
            (dict(block_shape=(16, 2)), "16 bytes"),
        ],
    )
    def test_bad_descriptors(self, fields, words):
        x = jnp.zeros((40, 32))
        good = dict(shape=(40, 32), strides=(32, 1), block_shape=(16, 32))
        with pytest.raises(ValueError, match=words):
            triton_call(
                TensorDescriptor(x, **{**good, **fields}), kernel=toys.copy_kernel, grid=1, BLOCK_M=16, BLOCK_N=32,
                out_type=TensorDescriptor(like(x), **good),
            )  # fmt: skip


class TestTransformations:
    def test_vmap_over_every_subset(self):
        x, y = jnp.arange(24.0).reshape(3, 8), jnp.arange(24.0).reshape(3, 8) * 10
        np.testing.assert_array_equal(jax.vmap(add)(x, y), x + y)
        np.testing.assert_array_equal(jax.vmap(add, (0, None))(x, y[0]), x + y[:1])
        np.testing.assert_array_equal(jax.vmap(add, (None, 1))(x[0], y.T), x[:1] + y)
        nested = jax.vmap(jax.vmap(add, (0, None)), (None, 0))(x, y)
        np.testing.assert_array_equal(nested, x[None] + y[:, None])

    def test_vmap_with_alias(self):
        def bump(x):
            return triton_call(
                x, N=6, kernel=toys.increment_kernel, out_type=like(x), grid=1, BLOCK=8, input_output_aliases={0: 0}
            )

        x = jnp.arange(18.0).reshape(3, 6)
        np.testing.assert_array_equal(jax.jit(jax.vmap(bump))(x), x + 1)

    def test_scan(self):
        out, _ = jax.lax.scan(lambda c, _: (add(c, c), None), jnp.ones(8), None, length=4)
        np.testing.assert_array_equal(out, jnp.full(8, 16.0))

    def test_gradient_advises(self):
        with pytest.raises(NotImplementedError, match="custom_vjp"):
            jax.grad(lambda x: add(x, x).sum())(jnp.ones(8))
        with pytest.raises(NotImplementedError, match="custom_vjp"):
            jax.jvp(lambda x: add(x, x), (jnp.ones(8),), (jnp.ones(8),))

    def test_custom_vjp_and_checkpoint(self):
        @jax.custom_vjp
        def double(x):
            return add(x, x)

        double.defvjp(lambda x: (double(x), None), lambda _, g: (add(g, g),))
        x = jnp.arange(8.0)
        grad = jax.grad(lambda x: (jax.checkpoint(double)(x) ** 2).sum())(x)
        np.testing.assert_array_equal(grad, 8 * x)

    def test_shard_map(self):
        devices = np.array(jax.devices()[: 2 if len(jax.devices()) > 1 else 1])
        mesh = jax.sharding.Mesh(devices, ("d",))
        spec = jax.sharding.PartitionSpec("d")
        x = jnp.arange(32.0)
        run = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False))
        np.testing.assert_array_equal(run(x, x), x + x)

    def test_every_device(self):
        for device in jax.devices()[:2]:
            x = jax.device_put(jnp.arange(8.0), device)
            result = jax.jit(add)(x, x)
            assert result.devices() == {device}
            np.testing.assert_array_equal(result, x + x)

    def test_unused_calls_disappear_unless_they_have_effects(self):
        def calls(**options):
            def f(x):
                triton_call(x, N=8, kernel=toys.affine_kernel, out_type=like(x), grid=1, BLOCK=8, **options)
                return x

            return jax.jit(f).lower(jnp.ones(8)).as_text().count("custom_call")

        assert calls(has_side_effect=True) >= 1

    def test_threads(self):
        x = jnp.arange(64.0)
        results, errors = {}, []

        def work(i):
            try:
                with contextlib.nullcontext() if HAS_GPU else fusedops.interpret():
                    results[i] = affine(x + i, block=2 ** (3 + i % 4))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not errors
        for i, result in results.items():
            np.testing.assert_allclose(result, (x + i) * 2 + 3)


class TestDecorators:
    def test_autotune_and_heuristics(self):
        for n in (256, 100):
            x = jnp.arange(float(n))
            out = triton_call(
                x, N=n, kernel=toys.tuned_kernel, out_type=like(x), grid=lambda meta, n=n: -(-n // meta["BLOCK"])
            )
            np.testing.assert_allclose(out, x * 3)

    def test_a_metaparameter_picks_the_config(self):
        x = jnp.arange(256.0)
        out = triton_call(x, N=256, BLOCK=128, kernel=toys.tuned_kernel, out_type=like(x), grid=2)
        np.testing.assert_allclose(out, x * 3)
        with pytest.raises(ValueError, match="no autotuning config agrees"):
            triton_call(x, N=256, BLOCK=32, kernel=toys.tuned_kernel, out_type=like(x), grid=8)


class TestErrors:
    def call(self, **changes):
        x = jnp.arange(8.0)
        args = dict(x_ptr=x, y_ptr=x, length=8, kernel=toys.add_kernel, out_type=like(x), grid=1, block_size=8)
        args |= changes
        return triton_call(**{k: v for k, v in args.items() if v is not None})

    @pytest.mark.parametrize(
        "changes, error, words",
        [
            (dict(block_sise=8), TypeError, "no parameter 'block_sise'; did you mean block_size"),
            (dict(num_warp=8), TypeError, "did you mean num_warps"),
            (dict(block_size=None), TypeError, "metaparameter block_size is missing"),
            (dict(y_ptr=None), ValueError, "1 outputs need a parameter, and 2 parameters have no operand"),
            (dict(out_type=(sds((8,), jnp.float32),) * 2), ValueError, "2 outputs need a parameter"),
            (dict(out_type=None), TypeError, "out_type= is missing"),
            (dict(out_type=3.0), TypeError, "shape and dtype"),
            (dict(grid=(1, 1, 1, 1)), ValueError, "at most 3"),
            (dict(grid=(1, 65536)), ValueError, "axis 1 has 65536 programs, CUDA allows 65535"),
            (dict(grid=2**31), ValueError, "CUDA allows 2147483647"),
            (dict(grid=-1), ValueError, "non-negative"),
            (dict(grid=(1.5,)), ValueError, "non-negative ints"),
            (dict(x_ptr="text"), TypeError, "x_ptr: expected an array"),
            (dict(x_ptr=jnp.zeros(8, jnp.complex64)), TypeError, "no dtype complex64"),
            (dict(x_ptr=jax.random.key(0)), TypeError, "no dtype key"),
            (dict(block_size=jnp.zeros(())), TypeError, "is a metaparameter"),
            (dict(input_output_aliases={0: 7}), ValueError, "no output 7"),
            (dict(zeroed_outputs=[3]), ValueError, "no output 3"),
            (dict(kernel=len), TypeError, "decorated with triton.jit"),
            (dict(num_warps=4, backend_options={"num_warps": 8}), ValueError, "num_warps"),
        ],
    )
    def test_before_anything_runs(self, changes, error, words):
        with pytest.raises(error, match=re.escape(words)):
            self.call(**changes)

    def test_alias_of_another_shape(self):
        x = jnp.arange(6.0)
        with pytest.raises(ValueError, match="must be equal"):
            triton_call(
                x, N=6, kernel=toys.increment_kernel, out_type=sds((7,), jnp.float32), grid=1, BLOCK=8,
                input_output_aliases={0: 0},
            )  # fmt: skip

    @pytest.mark.skipif(HAS_GPU, reason="needs a platform without kernels")
    def test_without_gpu_or_interpreter(self):
        with fusedops.kernels._launch._interpret_state(False), pytest.raises(RuntimeError, match="interpret"):
            add(jnp.ones(8), jnp.ones(8))

    def test_interpreting_is_part_of_the_jit_key(self):
        if HAS_GPU:
            pytest.skip("needs a platform without kernels")
        run = jax.jit(add)
        np.testing.assert_array_equal(run(jnp.ones(8), jnp.ones(8)), jnp.full(8, 2.0))
        with fusedops.kernels._launch._interpret_state(False), pytest.raises(RuntimeError, match="interpret"):
            run(jnp.ones(8), jnp.ones(8))
