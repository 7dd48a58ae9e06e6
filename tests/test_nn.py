"""Modules: the signatures, parameters and results of Flax's own."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fusedops
from fusedops.nn import linen
from fusedops.nn import nnx as fused_nnx
from fusedops.testing import assert_within_budget

KEY = jax.random.key(0)
same_tree = functools.partial(jax.tree.map, np.testing.assert_array_equal)


def inputs(*shape, dtype="float32"):
    return jax.random.normal(jax.random.key(len(shape)), shape, dtype)


def kernels(fn, *args):
    """Which implementations run, by `explain`."""
    return [entry.implementation for entry in fusedops.explain(fn, *args, platform="cuda")]


def wide(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, "float64") if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def both_linen(**options):
    causal = options.pop("is_causal", False)
    stock, fused = (
        nn.MultiHeadDotProductAttention(**options),
        linen.MultiHeadDotProductAttention(**options, is_causal=causal),
    )
    mask = (lambda x: nn.make_causal_mask(x[..., 0])) if causal else lambda x: None
    return (lambda p, x: stock.apply(p, x, mask=mask(x))), fused.apply, stock, fused


class TestLinen:
    def test_signature(self):
        ours, theirs = (inspect.signature(m.MultiHeadDotProductAttention).parameters for m in (linen, nn))
        names = [n for n in theirs if n not in ("parent", "name")]
        assert [n for n in ours if n not in ("parent", "name", "is_causal", "implementation")] == names
        for name in names:
            if name != "attention_fn":
                assert ours[name].default == theirs[name].default or callable(theirs[name].default), name
        call = [inspect.signature(m.MultiHeadDotProductAttention.__call__) for m in (linen, nn)]
        assert call[0] == call[1]
        function = [list(inspect.signature(m.dot_product_attention).parameters) for m in (linen, nn)]
        assert function[0] == [*function[1], "is_causal", "implementation"]

    @pytest.mark.parametrize("options", [
        dict(num_heads=4), dict(num_heads=2, qkv_features=24, out_features=10, use_bias=False),
        dict(num_heads=4, normalize_qk=True, param_dtype=jnp.bfloat16),
    ])  # fmt: skip
    def test_parameters(self, options):
        x = inputs(2, 5, 16)
        _, _, stock, fused = both_linen(**options)
        same_tree(stock.init(KEY, x), fused.init(KEY, x))

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_outputs_and_gradients(self, causal, dtype):
        x = inputs(2, 9, 32, dtype=dtype)
        theirs, ours, stock, _ = both_linen(num_heads=4, dtype=dtype, param_dtype=dtype, is_causal=causal)
        params = stock.init(KEY, x)

        def value_and_grad(apply, params, x):
            y, vjp = jax.vjp(apply, params, x)
            return y, vjp(jnp.sin(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)))

        got, want = (jax.jit(functools.partial(value_and_grad, f))(params, x) for f in (ours, theirs))
        with jax.enable_x64(True):
            exact, *_ = both_linen(num_heads=4, dtype="float64", param_dtype="float64", is_causal=causal)
            cotangent = jnp.asarray(jnp.sin(jnp.arange(got[0].size, dtype=dtype)), "float64").reshape(got[0].shape)
            y, vjp = jax.vjp(exact, wide(params), wide(x))
            truth = y, vjp(cotangent)
        for a, b, t in zip(*map(jax.tree.leaves, (got, want, truth)), strict=True):
            if np.linalg.norm(np.asarray(t)) > 1e-6:  # the bias of keys has no gradient
                assert_within_budget(a, b, t)

    def test_which_implementation_runs(self):
        x = inputs(2, 8, 32)
        _, apply, _, fused = both_linen(num_heads=4, is_causal=True)
        params = fused.init(KEY, x)
        assert kernels(apply, params, x) == ["triton"]
        assert kernels(lambda p, x: fused.apply(p, x, mask=nn.make_causal_mask(x[..., 0])), params, x) == ["xla"]

    def test_mask_and_causal_hold_together(self):
        x = inputs(2, 6, 16)
        keep = (jnp.arange(6) != 2)[None, None, None]
        _, _, stock, fused = both_linen(num_heads=2, is_causal=True)
        params = stock.init(KEY, x)
        both = nn.combine_masks(nn.make_causal_mask(x[..., 0]), jnp.broadcast_to(keep, (2, 1, 6, 6)))
        got = fused.apply(params, x, mask=jnp.broadcast_to(keep, (2, 1, 6, 6)))
        np.testing.assert_allclose(got, stock.apply(params, x, mask=both), rtol=1e-5, atol=1e-5)

    def test_cross_attention(self):
        q, kv = inputs(2, 5, 16), inputs(2, 11, 16)
        _, _, stock, fused = both_linen(num_heads=4)
        params = stock.init(KEY, q, kv)
        np.testing.assert_allclose(fused.apply(params, q, kv), stock.apply(params, q, kv), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("causal", [False, True])
    def test_decode(self, causal):
        x = inputs(2, 7, 16)
        whole = linen.MultiHeadDotProductAttention(num_heads=2, is_causal=True)
        step = linen.MultiHeadDotProductAttention(num_heads=2, decode=True, is_causal=causal)
        variables = step.init(KEY, x)
        params, cache = {"params": variables["params"]}, variables["cache"]
        outputs = []
        for i in range(7):
            y, changed = step.apply({**params, "cache": cache}, x[:, i : i + 1], mutable=["cache"])
            cache = changed["cache"]
            outputs.append(y)
        np.testing.assert_allclose(jnp.concatenate(outputs, 1), whole.apply(params, x), rtol=1e-5, atol=1e-5)

    def test_dropout_as_flax(self):
        x = inputs(2, 6, 16)
        _, _, stock, fused = both_linen(num_heads=2, dropout_rate=0.5)
        params = stock.init({"params": KEY, "dropout": KEY}, x, deterministic=True)
        got, want = (
            m.apply(params, x, deterministic=False, rngs={"dropout": jax.random.key(3)}) for m in (fused, stock)
        )
        np.testing.assert_array_equal(got, want)
        same_tree(fused.apply(params, x, deterministic=True), fused.apply(params, x, deterministic=True))

    def test_sown_weights_as_flax(self):
        x = inputs(2, 6, 16)
        _, _, stock, fused = both_linen(num_heads=2)
        params = stock.init(KEY, x)
        got, want = (m.apply(params, x, sow_weights=True, mutable=["intermediates"]) for m in (fused, stock))
        same_tree(got, want)

    def test_transforms(self):
        x = inputs(2, 6, 16)

        class Layer(nn.Module):
            attention: type

            @nn.compact
            def __call__(self, x, _):
                return x + self.attention(num_heads=2)(x), None

        results = []
        for kind in (nn.MultiHeadDotProductAttention, linen.MultiHeadDotProductAttention):
            stack = nn.scan(
                nn.remat(Layer, prevent_cse=False), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )(kind)
            params = stack.init(KEY, x, None)
            loss = lambda p, stack=stack: jnp.sum(stack.apply(p, x, None)[0] ** 2)
            results.append((params, jax.jit(jax.value_and_grad(loss))(params)))
        same_tree(*(r[0] for r in results))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), *(r[1] for r in results))

    def test_vmap(self):
        x = inputs(3, 2, 6, 16)
        _, apply, stock, _ = both_linen(num_heads=2, is_causal=True)
        params = stock.init(KEY, x[0])
        got = jax.vmap(apply, (None, 0))(params, x)
        for i in range(3):
            np.testing.assert_allclose(got[i], apply(params, x[i]), rtol=1e-6, atol=1e-6)

    def test_kernels_in_the_interpreter(self, interpret):
        x = inputs(2, 6, 16)
        _, _, stock, fused = both_linen(num_heads=2)
        params = stock.init(KEY, x)
        kernels = fused.clone(implementation="triton").apply(params, x)
        np.testing.assert_allclose(kernels, stock.apply(params, x), rtol=1e-5, atol=1e-5)

    def test_triton_refuses_what_it_cannot_do(self):
        x = inputs(2, 6, 16)
        fused = linen.MultiHeadDotProductAttention(num_heads=2, implementation="triton")
        with pytest.raises(NotImplementedError, match="mask"):
            fused.init(KEY, x, mask=nn.make_causal_mask(x[..., 0]))

    def test_errors(self):
        x = inputs(2, 6, 16)
        with pytest.raises(ValueError, match="implementation must be one of"):
            linen.MultiHeadDotProductAttention(num_heads=2, implementation="cuda").init(KEY, x)
        with pytest.raises(TypeError, match="is_causal"):
            linen.MultiHeadDotProductAttention(num_heads=2, attention_fn=nn.dot_product_attention, is_causal=True)
        q = inputs(1, 4, 2, 8)
        with pytest.raises(ValueError, match="dropout_rate"):
            linen.dot_product_attention(q, q, q, dropout_rate=1.5)
        with pytest.raises(ValueError, match="dropout_rng"):
            linen.dot_product_attention(q, q, q, dropout_rate=0.5)

    def test_as_attention_fn_of_flax(self):
        x = inputs(2, 6, 16)
        stock = nn.MultiHeadDotProductAttention(num_heads=2)
        hooked = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=linen.dot_product_attention)
        params = stock.init(KEY, x)
        assert kernels(hooked.apply, params, x) == ["triton"]
        np.testing.assert_allclose(hooked.apply(params, x), stock.apply(params, x), rtol=1e-5, atol=1e-5)


def both_nnx(causal=False, **options):
    options = dict(num_heads=4, in_features=32, decode=False) | options
    stock = nnx.MultiHeadAttention(**options, rngs=nnx.Rngs(0))
    return stock, fused_nnx.MultiHeadAttention(**options, is_causal=causal, rngs=nnx.Rngs(0))


class TestNnx:
    def test_signature(self):
        added = {"implementation", "is_causal"}
        for member in ("__init__", "__call__"):
            ours, theirs = (
                inspect.signature(getattr(cls, member)).parameters
                for cls in (fused_nnx.MultiHeadAttention, nnx.MultiHeadAttention)
            )
            assert [n for n in ours if n not in added - set(theirs)] == list(theirs)
        ours, theirs = (list(inspect.signature(m.dot_product_attention).parameters) for m in (fused_nnx, nnx))
        assert [n for n in ours if n in theirs] == theirs
        assert set(ours) - set(theirs) <= added | {"input_positions"}

    @pytest.mark.parametrize("options", [{}, dict(num_kv_heads=2), dict(normalize_qk=True, use_bias=False)])
    def test_parameters_and_outputs(self, options):
        if not set(options) <= set(inspect.signature(nnx.MultiHeadAttention.__init__).parameters):
            pytest.skip("this Flax has no grouped heads")
        stock, fused = both_nnx(**options)
        same_tree(*(nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (stock, fused)))
        x = inputs(2, 9, 32)
        np.testing.assert_allclose(fused(x), stock(x), rtol=1e-5, atol=1e-5)
        assert kernels(fused, x) == ["triton"]

    @pytest.mark.parametrize("in_call", [False, True])
    def test_causal(self, in_call):
        stock, fused = both_nnx(causal=not in_call)
        x = inputs(2, 9, 32)
        got = fused(x, is_causal=True) if in_call else fused(x)
        np.testing.assert_allclose(got, stock(x, mask=nn.make_causal_mask(x[..., 0])), rtol=1e-5, atol=1e-5)

    def test_gradients_under_jit(self):
        stock, fused = both_nnx()
        x = inputs(2, 9, 32)
        grads = [nnx.jit(nnx.grad(lambda m, x: jnp.sum(m(x) ** 2)))(m, x) for m in (stock, fused)]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *map(nnx.to_pure_dict, grads))

    def test_decode(self):
        fused = both_nnx(causal=True)[1]
        x = inputs(2, 7, 32)
        whole = fused(x)
        fused.init_cache(x.shape)
        steps = [fused(x[:, i : i + 1], decode=True) for i in range(7)]
        np.testing.assert_allclose(jnp.concatenate(steps, 1), whole, rtol=1e-5, atol=1e-5)

    def test_mask_and_dropout_as_flax(self):
        stock, fused = both_nnx(dropout_rate=0.5)
        x = inputs(2, 6, 32)
        mask = nn.make_causal_mask(x[..., 0])
        got, want = (m(x, mask=mask, deterministic=False, rngs=nnx.Rngs(dropout=5)) for m in (fused, stock))
        np.testing.assert_array_equal(got, want)

    def test_sown_weights_as_flax(self):
        stock, fused = both_nnx()
        x = inputs(2, 6, 32)
        got, want = (nnx.capture(m, nnx.Intermediate)(x, sow_weights=True) for m in (fused, stock))
        same_tree(*(jax.tree.map(jnp.asarray, nnx.to_pure_dict(x)) for x in (got[1], want[1])))
        np.testing.assert_array_equal(got[0], want[0])

    def test_kernels_in_the_interpreter(self, interpret):
        stock, _ = both_nnx()
        fused = fused_nnx.MultiHeadAttention(4, in_features=32, decode=False, implementation="triton", rngs=nnx.Rngs(0))
        x = inputs(2, 6, 32)
        np.testing.assert_allclose(fused(x), stock(x), rtol=1e-5, atol=1e-5)

    def test_errors(self):
        q = inputs(1, 4, 2, 8)
        with pytest.raises(ValueError, match="input_positions"):
            fused_nnx.dot_product_attention(q, q, q, input_positions=jnp.arange(4))
        with pytest.raises(NotImplementedError, match="bias"):
            fused_nnx.dot_product_attention(q, q, q, jnp.zeros((1, 2, 4, 4)), implementation="triton")
