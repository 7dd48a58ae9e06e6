"""What users of peers, and attackers of ours, have met around kernels: meshes, late lowering, scalars, decorators."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fusedops

pytest.importorskip("triton")
import triton

import toys
from fusedops import triton_call

ON_GPU = jax.default_backend() == "gpu"
needs_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


@pytest.fixture(autouse=True)
def on_device():
    with contextlib.nullcontext() if ON_GPU else fusedops.interpret():
        yield


def add(x, y):
    return triton_call(x, y, x.size, kernel=toys.add_kernel, out_type=x, grid=1, block_size=8)


def mesh(kind):
    return jax.make_mesh((8,), ("x",), axis_types=(kind,))


@needs_devices
class TestShardMap:
    """With check_vma=True, results vary along the axes along which an operand varies."""

    def run(self, fn, in_specs, out_specs, *args):
        return jax.jit(jax.shard_map(fn, mesh=mesh(AxisType.Auto), in_specs=in_specs, out_specs=out_specs))(*args)

    def test_results_vary(self):
        x, y = jnp.arange(64.0).reshape(8, 8), jnp.arange(8.0).reshape(1, 8)
        np.testing.assert_array_equal(self.run(add, (P("x"), P()), P("x"), x, y), x + y)
        scan = lambda x: jax.lax.scan(lambda c, _: (add(c, x), None), x, None, length=2)[0]
        np.testing.assert_array_equal(self.run(scan, P("x"), P("x"), x), 3 * x)
        with pytest.raises(ValueError, match="out_specs"):
            self.run(add, (P("x"), P()), P(), x, y)

    @pytest.mark.parametrize("implementation", [None, "triton", "xla"])
    def test_gradient_of_what_is_the_same_everywhere(self, implementation):
        q, k, v = (jax.random.normal(key, (8, 6, 2, 4)) for key in jax.random.split(jax.random.key(0), 3))

        def loss(q, k, v, implementation=implementation):
            o = fusedops.attention(q, k, v, is_causal=True, implementation=implementation)
            return jnp.sum(jnp.sin(o))

        def sharded(q, k, v):
            each = lambda q, k, v: jax.lax.psum(loss(q, k, v), "x")
            return self.run(each, (P("x"), P(), P()), P(), q, k, v)

        def whole(q, k, v):
            return loss(q, *(jnp.broadcast_to(x, q.shape) for x in (k, v)), implementation="xla")

        got, want = (jax.grad(f, (0, 1, 2))(q, k[:1], v[:1]) for f in (sharded, whole))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@needs_devices
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_explicit_mesh_keeps_its_sharding(implementation):
    explicit = mesh(AxisType.Explicit)
    with jax.set_mesh(explicit):
        sharding = NamedSharding(explicit, P("x"))
        q = jax.device_put(jax.random.normal(jax.random.key(0), (8, 6, 2, 4)), sharding)
        fn = functools.partial(fusedops.attention, implementation=implementation)
        o = jax.jit(lambda q: fn(q, q, q))(q)
        assert jax.typeof(o).sharding.spec[0] == "x"
        gradient = jax.jit(jax.grad(lambda q: jnp.sum(fn(q, q, q))))(q)
        assert jax.typeof(gradient).sharding.spec[0] == "x"
        _, vjp = jax.vjp(lambda q: fn(q, q, q), q)
        np.testing.assert_allclose(vjp(jnp.ones_like(o))[0], gradient, rtol=1e-4, atol=1e-5)


def test_traced_inside_lowered_outside():
    x, q = jnp.arange(8.0), jnp.ones((1, 4, 2, 8))
    call = jax.jit(lambda x: add(x, x)).trace(x)
    op = jax.jit(lambda q: fusedops.attention(q, q, q, implementation="triton")).trace(q)
    with contextlib.ExitStack() as stack:
        if not ON_GPU:
            from fusedops.kernels import _launch

            stack.enter_context(_launch.interpreting_is(False))
        np.testing.assert_array_equal(call.lower().compile()(x), 2 * x)
        np.testing.assert_allclose(op.lower().compile()(q), q, rtol=1e-6)


@pytest.mark.parametrize("scalar", [ml_dtypes.bfloat16(1.5), ml_dtypes.float8_e4m3fn(1.5), np.longdouble(1.5)], ids=str)
def test_scalars_of_other_types(scalar):
    x = jnp.arange(4.0)
    out = triton_call(x, scalar, N=4, kernel=toys.scale_kernel, out_type=x, grid=1, BLOCK=4)
    np.testing.assert_array_equal(out, 1.5 * x)


def test_an_integer_too_large():
    x = jnp.arange(4.0)
    with pytest.raises(ValueError, match="factor: the integer 18446744073709551616 does not fit in 64 bits"):
        triton_call(x, 2**64, N=4, kernel=toys.scale_kernel, out_type=x, grid=1, BLOCK=4)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_one_ref_twice(jit):
    def f(x):
        ref = jax.new_ref(x)
        triton_call(ref, ref, 8, kernel=toys.add_kernel, out_type=x, grid=1, block_size=8)
        return ref[...]

    with pytest.raises(ValueError, match="one Ref is passed to two parameters"):
        jit(f)(jnp.arange(8.0))


def test_outer_heuristics_run_first():
    x = jnp.arange(7.0)
    bare = toys.tuned_kernel.fn.fn
    inner = triton.heuristics({"EVEN": lambda values: values["N"] % values["BLOCK"] == 0})(bare)
    outer = triton.heuristics({"BLOCK": lambda values: triton.next_power_of_2(values["N"])})(inner)
    np.testing.assert_array_equal(triton_call(x, N=7, kernel=outer, out_type=x, grid=1), 3 * x)


class TestHiddenGradients:
    """A NaN in one row reaches only what that row sees, also by plain JAX's own derivatives."""

    @pytest.mark.parametrize("implementation", [None, "triton", "xla"])
    def test_causal(self, implementation):
        q, k, v = (jax.random.normal(key, (1, 6, 2, 4)) for key in jax.random.split(jax.random.key(0), 3))
        fn = functools.partial(fusedops.attention, is_causal=True, implementation=implementation)
        dq = jax.grad(lambda q: jnp.sum(fn(q, k.at[0, 3].set(jnp.nan), v)[:, :3]))(q)
        assert jnp.isfinite(dq[:, :3]).all()
        bad = q.at[0, 1].set(jnp.nan)
        dk, dv = jax.grad(lambda k, v: jnp.sum(fn(bad, k, v)[:, 3:]), (0, 1))(k, v)
        assert jnp.isfinite(dk[:, 2:]).all() and jnp.isfinite(dv[:, 2:]).all()
