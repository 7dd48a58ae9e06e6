"""Attention: what the cross-cutting tests of test_all_ops.py do not ask.

As there, each test runs by the reference and by the kernels in Triton's interpreter, and on a GPU by the
kernels alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusedops
from fusedops import _attention
from fusedops.testing import assert_within_budget, error


@pytest.fixture(params=["native", "interpret"])
def where(request):
    if request.param == "native":
        yield request.param
        return
    if jax.default_backend() == "gpu":
        pytest.skip("the kernels themselves run on this machine")
    pytest.importorskip("triton")
    with fusedops.interpret():
        yield request.param


everywhere = pytest.mark.usefixtures("where")
masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def draw(T, S, N=2, K=1, H=16, D=None, B=2, dtype="float32", seed=0):
    """query, key, value, and cotangents of the output and the logsumexp."""
    rng = np.random.default_rng([T, S, N, K, H, seed])
    D = H if D is None else D
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, D), (B, T, N, D)
    arrays = [jnp.asarray(rng.normal(size=s).astype(np.float32)).astype(dtype) for s in shapes]
    return *arrays, jnp.asarray(rng.normal(size=(B, T, N)).astype(np.float32))


def both_ways(q, k, v, do, dlse, implementation=None, **options):
    """o, lse, dq, dk and dv, jitted."""

    def run(q, k, v, do, dlse):
        fn = functools.partial(fusedops.attention, return_residual=True, implementation=implementation, **options)
        results, vjp = jax.vjp(fn, q, k, v)
        return *results, *vjp((do, dlse))

    return jax.jit(run)(q, k, v, do, dlse)


def check(*arrays, **options):
    """Within the error budget of plain JAX in the same dtype."""
    with jax.default_matmul_precision("highest"):
        actual = both_ways(*arrays, **options)
        reference = both_ways(*arrays, implementation="xla", **options)
    with jax.enable_x64(True):
        truth = both_ways(*(jnp.asarray(x, "float64") for x in arrays), implementation="xla", **options)
    for name, *three in zip(("o", "lse", "dq", "dk", "dv"), actual, reference, truth, strict=True):
        assert_within_budget(*three, name=name)
    return actual


@everywhere
class TestShapes:
    @masks
    @pytest.mark.parametrize("T, S", [(1, 7), (7, 1), (2, 5), (5, 2), (15, 16), (17, 33), (64, 65), (129, 65)], ids=str)
    def test_lengths(self, T, S, causal):
        check(*draw(T, S, B=4), is_causal=causal)

    @pytest.mark.parametrize("D", [1, 8, 40, 64, 80, 96, 100, 128, 160, 192, 256])
    def test_head_dims(self, D):
        check(*draw(19, 21, H=D, B=1 if D > 8 else 8), is_causal=True)

    @pytest.mark.parametrize("H, D", [(192, 128), (24, 8), (8, 40), (3, 130)], ids=str)
    def test_value_dim_differs(self, H, D):
        check(*draw(18, 35, H=H, D=D), is_causal=False)

    @pytest.mark.parametrize("N, K", [(3, 3), (6, 3), (5, 1), (8, 2), (71, 1)], ids=str)
    def test_grouped_heads(self, N, K):
        check(*draw(9, 18, N=N, K=K, B=1), is_causal=True)

    def test_grouped_heads_are_repeated_heads(self):
        q, k, v, do, dlse = draw(20, 24, N=6, K=2)
        got = both_ways(q, k, v, do, dlse)
        expected = both_ways(q, *(jnp.repeat(x, 3, axis=2) for x in (k, v)), do, dlse)
        summed = (*expected[:3], *(x.reshape(2, 24, 2, 3, 16).sum(3) for x in expected[3:]))
        for g, e in zip(got, summed, strict=True):
            assert error(g, e).peak < (1e-5 if jax.default_backend() == "cpu" else 1e-2)

    @pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 2)], ids=str)
    def test_leading_axes(self, lead):
        B = int(np.prod(lead))
        q, k, v, *_ = draw(10, 12, B=B)
        o, lse = fusedops.attention(q, k, v, return_residual=True)
        shaped = [x.reshape(*lead, *x.shape[1:]) for x in (q, k, v)]
        o_, lse_ = fusedops.attention(*shaped, return_residual=True)
        assert (o_.shape, lse_.shape) == ((*lead, 10, 2, 16), (*lead, 10, 2))
        np.testing.assert_array_equal(o_.reshape(o.shape), o)
        np.testing.assert_array_equal(lse_.reshape(lse.shape), lse)

    @masks
    def test_no_keys(self, causal):
        """Output 0, logsumexp -inf, gradients 0; not NaN and not the mean of anything."""
        o, lse, *grads = both_ways(*draw(4, 0), is_causal=causal)
        np.testing.assert_array_equal(o, 0)
        np.testing.assert_array_equal(lse, -np.inf)
        for grad in grads:
            np.testing.assert_array_equal(grad, 0)

    @masks
    def test_no_queries(self, causal):
        o, lse, dq, dk, dv = both_ways(*draw(0, 4), is_causal=causal)
        assert (o.size, lse.size, dq.size) == (0, 0, 0)
        np.testing.assert_array_equal(dk, 0)
        np.testing.assert_array_equal(dv, 0)


@everywhere
class TestMeaning:
    @masks
    @pytest.mark.parametrize("T, S", [(2, 5), (5, 2), (1, 7), (4, 9), (40, 37)], ids=str)
    def test_which_keys_are_visible(self, T, S, causal):
        """A one-hot value per key reads off which keys each query saw."""
        q, k, *_ = draw(T, S, N=1)
        v = jnp.broadcast_to(jnp.eye(S)[None, :, None], (2, S, 1, S))
        seen = np.asarray(fusedops.attention(q, k, v, is_causal=causal))[:, :, 0] > 0
        expected = np.tril(np.ones((T, S), bool)) if causal else np.ones((T, S), bool)
        np.testing.assert_array_equal(seen, np.broadcast_to(expected, seen.shape))

    @masks
    @pytest.mark.parametrize("scale", [None, 0.3, -0.5, 0.0])
    def test_as_jax_nn(self, scale, causal):
        q, k, v, *_ = draw(33, 20, N=4, K=2)
        options = dict(scale=scale, is_causal=causal, return_residual=True)
        with jax.default_matmul_precision("highest"):
            results = fusedops.attention(q, k, v, **options), jax.nn.dot_product_attention(q, k, v, **options)
        with jax.enable_x64(True):
            truth = jax.nn.dot_product_attention(*(jnp.asarray(x, "float64") for x in (q, k, v)), **options)
        for got, expected, exact in zip(*results, truth, strict=True):
            assert got.shape == expected.shape
            assert_within_budget(got, expected, exact)

    def test_negative_scale_gradients(self):
        check(*draw(20, 33), scale=-0.4, is_causal=True)

    def test_logsumexp_is_natural(self):
        q, k, v, *_ = draw(12, 17, N=1)
        with jax.default_matmul_precision("highest"):
            _, lse = fusedops.attention(q, k, v, scale=0.7, return_residual=True)
            logits = 0.7 * jnp.einsum("btnh,bsnh->btns", q, k)
        np.testing.assert_allclose(lse, jax.nn.logsumexp(logits, axis=-1), rtol=1e-5, atol=1e-5)
        assert lse.dtype == jnp.float32

    def test_only_the_logsumexp_has_a_cotangent(self):
        q, k, v, do, dlse = draw(14, 19)
        _, _, dq, dk, dv = check(q, k, v, 0 * do, dlse)
        assert error(dq, 0 * dq).relative > 0 and np.abs(dk).max() > 0
        np.testing.assert_array_equal(dv, 0)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision(self, dtype):
        check(*draw(70, 45, N=4, K=2, H=32, dtype=dtype))

    def test_large_logits_in_float16(self):
        x = jnp.full((1, 20, 1, 128), 256, jnp.float16)
        o, lse, *grads = both_ways(x, x, jnp.ones_like(x), jnp.ones_like(x), jnp.ones((1, 20, 1)))
        np.testing.assert_array_equal(o, 1)
        np.testing.assert_allclose(lse, 128**-0.5 * 128 * 256**2 + np.log(20), rtol=1e-5)
        assert all(np.isfinite(g).all() for g in grads[2:])

    @masks
    def test_logits_far_below_zero(self, causal):
        """Keys that pad a tile count as absent: with every logit near -100, exp(0 - lse) would be inf."""
        k = draw(72, 72, N=1)[1]
        k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
        mean = k[:, :1] * 0 + 1 / 4
        q, k = jnp.broadcast_to(-100 * mean, k.shape), mean + 0.01 * k
        results = check(q, k, *draw(72, 72, N=1)[2:], scale=1.0, is_causal=causal)
        assert np.max(results[1]) < -88
        assert all(np.isfinite(x).all() for x in results)


@everywhere
class TestHidden:
    """What no query of a row may see reaches neither its result nor its gradient."""

    @pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
    def test_later_keys(self, poison):
        T, first = 40, 21
        q, k, v, do, dlse = draw(T, T)
        clean = both_ways(q, k, v, do.at[:, first:].set(0), dlse.at[:, first:].set(0), is_causal=True)
        for bad_k, bad_v in ((k, v.at[:, first:].set(poison)), (k.at[:, first:].set(poison), v)):
            o, lse, dq, *_ = both_ways(q, bad_k, bad_v, do, dlse, is_causal=True)
            for got, expected in ((o, clean[0]), (lse, clean[1]), (dq, clean[2])):
                np.testing.assert_allclose(got[:, :first], expected[:, :first], rtol=1e-5, atol=1e-5)

    def test_a_visible_nan_is_not_hidden(self):
        """NaN in value 21 reaches every query from 21 on, and none before."""
        q, k, v, *_ = draw(40, 40)
        o = np.asarray(fusedops.attention(q, k, v.at[:, 21, :, 3].set(jnp.nan), is_causal=True))
        assert np.isnan(o[:, 21:, :, 3]).all()
        assert np.isfinite(o[:, :21]).all()

    def test_earlier_queries(self):
        """NaN in the cotangent of query 12 reaches the value gradients of keys 0 to 12 only."""
        q, k, v, do, dlse = draw(40, 40)
        *_, dq, dk, dv = both_ways(q, k, v, do.at[:, 12].set(jnp.nan), dlse, is_causal=True)
        for grad in (dk, dv):
            assert np.isnan(grad[:, :13]).any(axis=-1).all()
            assert np.isfinite(grad[:, 13:]).all()
        assert np.isfinite(np.delete(np.asarray(dq), 12, axis=1)).all()

    def test_keys_beyond_the_last_query(self):
        q, k, v, do, dlse = draw(20, 50)
        results = both_ways(q, *(x.at[:, 20:].set(jnp.nan) for x in (k, v)), do, dlse, is_causal=True)
        assert all(np.isfinite(x).all() for x in results)
        for grad in results[3:]:
            np.testing.assert_array_equal(grad[:, 20:], 0)


class TestFrame:
    @pytest.mark.parametrize("names", [("fusedops_attention_out", "fusedops_attention_lse"), ()], ids=["kept", "none"])
    def test_names_for_checkpoint_policies(self, names):
        """With both results kept, the backward pass does not run the forward op again."""
        q, k, v, *_ = draw(8, 8)
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        fn = jax.checkpoint(lambda *xs: fusedops.attention(*xs, is_causal=True).sum(), policy=policy)
        entries = fusedops.explain(jax.grad(fn, argnums=(0, 1, 2)), q, k, v)
        times = {e.op: e.times for e in entries}
        if _attention.run is not None and set(times) >= {"attention", "attention gradient"}:
            assert times == {"attention": 1 if names else 2, "attention gradient": 1}

    def test_xla_has_every_derivative(self):
        q, k, v, *_ = draw(3, 4, N=1, H=2, B=1)
        fn = functools.partial(fusedops.attention, is_causal=True, implementation="xla")
        _, tangent = jax.jvp(fn, (q, k, v), (q, k, v))
        hessian = jax.hessian(lambda q: fn(q, k, v).sum())(q)
        assert np.isfinite(tangent).all() and np.isfinite(hessian).all()

    def test_xla_gradients_of_rows_without_keys(self):
        q, k, v, do, dlse = draw(4, 0)
        for grad in both_ways(q, k, v, do, dlse, implementation="xla")[2:]:
            assert np.isfinite(grad).all()

    def test_wide_dtypes_run_plain_jax(self):
        with jax.enable_x64(True):
            q, k, v, *_ = (jnp.asarray(x, "float64") for x in draw(5, 6))
            o, lse = fusedops.attention(q, k, v, return_residual=True)
            assert (o.dtype, lse.dtype) == (jnp.float64, jnp.float64)
            expected = jax.nn.dot_product_attention(q, k, v)
            assert error(o, expected).peak < 1e-6
            with pytest.raises(NotImplementedError, match="float64"):
                fusedops.attention(q, k, v, implementation="triton")
        entries = fusedops.explain(fusedops.attention, *(x.astype(jnp.complex64) for x in (q, k, v)))
        assert "complex64" in entries[0].why

    def test_head_dim_beyond_the_kernels(self):
        q, k, v, *_ = draw(5, 6, H=257)
        assert fusedops.attention(q, k, v).shape == q.shape
        with pytest.raises(NotImplementedError, match="257"):
            fusedops.attention(q, k, v, implementation="triton")

    @pytest.mark.parametrize(
        "change, kind, message",
        [
            (dict(key=(2, 6, 1, 8)), ValueError, "key has shape"),
            (dict(value=(2, 7, 1, 16)), ValueError, "value has shape"),
            (dict(query=(2, 5, 3, 16), key=(2, 6, 2, 16), value=(2, 6, 2, 16)), ValueError, "multiple of the 2"),
            (dict(query=(5, 16)), ValueError, "expected axes"),
            (dict(implementation="cudnn"), ValueError, "implementation must be one of"),
            (dict(scale="big"), TypeError, "scale must be a number"),
        ],
        ids=["key dim", "lengths", "heads", "rank", "implementation", "scale"],
    )
    def test_errors(self, change, kind, message):
        arrays = dict(query=(2, 5, 2, 16), key=(2, 6, 1, 16), value=(2, 6, 1, 16))
        given = {n: jnp.ones(change.get(n, shape)) for n, shape in arrays.items()}
        with pytest.raises(kind, match=message):
            fusedops.attention(**given, **{n: x for n, x in change.items() if n not in arrays})

    @pytest.mark.parametrize("dtypes", [("float16", "float32", "float32"), ("float32", "float32", "bfloat16")], ids=str)
    def test_mixed_dtypes_raise_as_in_jax_nn(self, dtypes):
        arrays = [x.astype(d) for x, d in zip(draw(4, 5)[:3], dtypes, strict=True)]
        for fn in (fusedops.attention, jax.nn.dot_product_attention):
            with pytest.raises(ValueError, match="dtype"):
                fn(*arrays)

    def test_integers_raise(self):
        with pytest.raises(TypeError, match="query must have a dtype of kind"):
            fusedops.attention(*(x.astype(int) for x in draw(4, 5)[:3]))

    @pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernels run here")
    def test_kernels_on_a_cpu_raise(self):
        pytest.importorskip("triton")
        with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
            fusedops.attention(*draw(4, 5)[:3], implementation="triton")

    def test_matmul_precision_is_that_of_the_call(self):
        pytest.importorskip("triton")
        from fusedops.kernels.attention.configs import dot_precision

        cases = {None: "tf32", "default": "tf32", "tensorfloat32": "tf32", "highest": "ieee", "float32": "ieee"}
        assert {name: dot_precision(name) for name in cases} == cases


def tiles():
    """Every tile of the default tables, and the kernel that it is for."""
    pytest.importorskip("triton")
    from fusedops.kernels import Config
    from fusedops.kernels.attention import configs

    found = {
        (kernel, row[:2])
        for table in (configs.LARGE, configs.SMALL)
        for kernel, by_size in table.items()
        for by_dim in by_size.values()
        for row in by_dim.values()
    }
    return [(kernel, Config(dict(BLOCK_T=t, BLOCK_S=s))) for kernel, (t, s) in sorted(found)]


@masks
def test_every_default_tile(interpret, causal):
    """Forced in turn, at lengths that no tile divides."""
    from fusedops.kernels.attention import attention_bwd, attention_fwd

    options = _attention.Options(0.25, causal, "highest", None)
    q, k, v, do, dlse = draw(70, 67, N=2, B=1)
    o, lse = _attention._forward_reference(options, q, k, v)
    residuals = (q, k, v, o, lse, do, jnp.swapaxes(dlse, 1, 2))
    expected = dict(zip(("dq", "dk", "dv"), _attention._backward_reference(options, *residuals), strict=True))
    for kernel, config in tiles():
        if kernel == "fwd":
            got = attention_fwd(q, k, v, options=options, config=config)
            pairs = list(zip(got, (o, lse), strict=True))
        else:
            grads = attention_bwd(*residuals, options=options, **{f"{kernel}_config": config})
            got = dict(zip(("dq", "dk", "dv"), grads, strict=True))
            pairs = [(got[n], expected[n]) for n in (("dq",) if kernel == "dq" else ("dk", "dv"))]
        for actual, truth in pairs:
            assert error(actual, truth).peak < 1e-5, f"{kernel} with {config}"
