"""Attention's options that say who sees whom, and what is added to the logits, against numpy and `jax.nn`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusedops

B, T, S, N, K, H, D = 2, 7, 9, 4, 2, 8, 6


def draw(dtype="float32", **sizes):
    z = dict(B=B, T=T, S=S, N=N, K=K, H=H, D=D) | sizes
    rng = np.random.default_rng(sum(z.values()))
    shapes = (z["B"], z["T"], z["N"], z["H"]), (z["B"], z["S"], z["K"], z["H"]), (z["B"], z["S"], z["K"], z["D"])
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


RNG = np.random.default_rng(5)
RULES = {
    "bias": dict(bias=RNG.normal(size=(B, N, T, S)).astype(np.float32)),
    "bias of heads": dict(bias=RNG.normal(size=(1, N, 1, S)).astype(np.float32)),
    "bias of no batch": dict(bias=RNG.normal(size=(N, T, S)).astype(np.float32)),
    "mask": dict(mask=RNG.random((B, 1, T, S)) < 0.6),
    "mask of heads": dict(mask=RNG.random((1, N, T, 1)) < 0.6),
    "causal": dict(is_causal=True),
    "offset": dict(query_offset=2, is_causal=True),
    "offsets": dict(query_offset=np.array([-3, 4]), is_causal=True),
    "query lengths": dict(query_seq_lengths=np.array([3, 7])),
    "key lengths": dict(key_value_seq_lengths=np.array([0, 5])),
    "window": dict(local_window_size=(2, 1)),
    "symmetric window": dict(local_window_size=1, query_offset=1),
    "segments": dict(
        query_segment_ids=np.sort(RNG.integers(0, 3, (B, T))), key_value_segment_ids=np.sort(RNG.integers(0, 3, (B, S)))
    ),
    "cap": dict(logits_soft_cap=1.5),
    "sinks": dict(sinks=RNG.normal(size=N).astype(np.float32)),
    "scale": dict(scale=0.7),
}
NAMES = list(RULES)
PAIRS = [(a, b) for i, a in enumerate(NAMES) for b in NAMES[i:] if a == b or not set(RULES[a]) & set(RULES[b])]


def truth(q, k, v, scale=None, bias=0.0, mask=True, is_causal=False, query_offset=0, query_seq_lengths=None,
          key_value_seq_lengths=None, local_window_size=None, query_segment_ids=None, key_value_segment_ids=None,
          logits_soft_cap=None, sinks=None):  # fmt: skip
    """o and lse in float64, one row at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (b, t, n, h), (s, kv, d) = q.shape, v.shape[1:]
    bias, mask = (np.broadcast_to(x, (b, n, t, s)) for x in (bias, mask))
    o, lse = np.zeros((b, t, n, d)), np.full((b, t, n), -np.inf)
    left, right = local_window_size if isinstance(local_window_size, tuple) else [local_window_size] * 2
    offsets = np.broadcast_to(query_offset, b)
    for i, row, head in np.ndindex(b, t, n):
        at = row + offsets[i]
        logits, values = [], []
        for j in range(s):
            hidden = (
                (is_causal and j > at)
                or (local_window_size is not None and not at - left <= j <= at + right)
                or (query_seq_lengths is not None and row >= query_seq_lengths[i])
                or (key_value_seq_lengths is not None and j >= key_value_seq_lengths[i])
                or (query_segment_ids is not None and query_segment_ids[i, row] != key_value_segment_ids[i, j])
                or not mask[i, head, row, j]
            )
            if not hidden:
                x = q[i, row, head] @ k[i, j, head // (n // kv)] * (h**-0.5 if scale is None else scale)
                x += bias[i, head, row, j]
                logits.append(x if logits_soft_cap is None else logits_soft_cap * np.tanh(x / logits_soft_cap))
                values.append(v[i, j, head // (n // kv)])
        if sinks is not None:
            logits.append(sinks[head])
            values.append(np.zeros(d))
        if logits:
            lse[i, row, head] = np.logaddexp.reduce(logits)
            o[i, row, head] = np.exp(logits - lse[i, row, head]) @ np.array(values)
    return o, lse


@pytest.mark.parametrize("names", PAIRS, ids=lambda pair: "+".join(dict.fromkeys(pair)).replace(" ", "_"))
def test_as_numpy(names):
    options = RULES[names[0]] | RULES[names[1]]
    arrays = draw()
    o, lse = fusedops.attention(*arrays, **options, return_residual=True)
    expected = truth(*arrays, **options)
    np.testing.assert_allclose(o, expected[0], rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["bias", "mask", "causal", "query lengths", "key lengths", "window"])
def test_gradients_as_jax_nn(name):
    """Where every query sees a key; `jax.nn` gives the others the mean of the values."""
    options = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in RULES[name].items()}
    if name == "mask":
        options["mask"] = options["mask"].at[..., 0].set(True)
    if name == "key lengths":
        options["key_value_seq_lengths"] = jnp.array([2, 5])
    given = (*draw(T=T if name in ("bias", "mask") else S, D=H), options.pop("bias", None))
    rows = 3 if name == "query lengths" else S
    numbers = tuple(range(4 if name == "bias" else 3))

    def loss(fn, *given):
        return jnp.sum(jnp.sin(fn(*given, **options)[:, :rows].astype(jnp.float32)))

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, fn), numbers))(*given)
        for fn in (fusedops.attention, jax.nn.dot_product_attention)
    )
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(B, N, T, S), (1, N, 1, S), (N, T, S), (B, 1, 1, 1)], ids=str)
def test_gradient_of_bias_has_its_shape(shape):
    q, k, v = draw()
    bias = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.bfloat16)
    loss = lambda bias: jnp.sum(jnp.sin(fusedops.attention(q, k, v, bias)))
    whole = jax.grad(loss)(jnp.broadcast_to(bias.astype(jnp.float32), (B, N, T, S)))
    got = jax.grad(loss)(bias)
    assert got.shape == shape and got.dtype == bias.dtype
    axes = [i for i, n in enumerate((1,) * (4 - len(shape)) + shape) if n == 1]
    np.testing.assert_allclose(got.reshape(-1), whole.sum(axes, keepdims=True).reshape(-1), rtol=1e-2, atol=2e-3)


class TestSinks:
    def test_a_key_without_value(self):
        q, k, v = draw(T=S)
        sinks = jnp.asarray(RULES["sinks"]["sinks"])

        def by_hand(q, k, v, sinks):
            x = jnp.einsum("btkgh,bskh->bkgts", q.reshape(B, S, K, N // K, H), k) * H**-0.5
            column = jnp.broadcast_to(sinks.reshape(1, K, N // K, 1, 1), (*x.shape[:-1], 1))
            p = jax.nn.softmax(jnp.concatenate([x, column], -1))[..., :-1]
            return jnp.einsum("bkgts,bskd->btkgd", p, v).reshape(B, S, N, D)

        ours = lambda *xs: fusedops.attention(*xs[:3], sinks=xs[3])
        grads = [
            jax.grad(lambda *xs, fn=fn: jnp.sum(jnp.cos(fn(*xs))), (0, 1, 2, 3))(q, k, v, sinks)
            for fn in (ours, by_hand)
        ]
        for a, b in zip(*grads, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


class TestHidden:
    """What no row sees, or only some rows see, may be NaN."""

    @pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
    def test_beyond_a_length(self, value):
        q, k, v = draw()
        lengths = jnp.array([4, 6])
        past = (jnp.arange(S)[None] >= lengths[:, None])[..., None, None]

        def run(k, v):
            fn = lambda q, k, v: fusedops.attention(q, k, v, key_value_seq_lengths=lengths)
            o, vjp = jax.vjp(fn, q, k, v)
            return o, *vjp(jnp.cos(o))

        for a, b in zip(run(jnp.where(past, value, k), jnp.where(past, value, v)), run(k, v), strict=True):
            np.testing.assert_array_equal(a, b)

    def test_under_a_mask_for_some_rows(self):
        q, k, v = draw()
        mask = jnp.ones((1, 1, T, S), bool).at[..., :3, 5].set(False)
        fn = lambda q, k, v: fusedops.attention(q, k, v, mask=mask)
        bad = lambda x: x.at[:, 5].set(jnp.nan)
        (o, vjp), clean = jax.vjp(fn, q, bad(k), bad(v)), fn(q, k, v)
        np.testing.assert_array_equal(o[:, :3], clean[:, :3])
        assert np.isnan(o[:, 3:]).all()
        dq, _, _ = vjp(jnp.zeros_like(o).at[:, :3].set(1.0))
        assert np.isfinite(dq[:, :3]).all()

    def test_bias_under_a_mask(self):
        q, k, v = draw()
        bias = jnp.zeros((B, N, T, S))
        mask = jnp.ones((T, S), bool).at[:, 5].set(False)[None]
        grads = [
            jax.grad(lambda b: jnp.sum(jnp.sin(fusedops.attention(q, k, v, b, mask))))(b)
            for b in (bias, bias.at[..., 5].set(jnp.nan))
        ]
        np.testing.assert_array_equal(*grads)

    @pytest.mark.parametrize("options", [
        dict(mask=np.zeros((1, T, S), bool)), dict(key_value_seq_lengths=np.zeros(B, int)),
        dict(query_offset=-20, is_causal=True), dict(bias=np.full((1, T, S), -np.inf, np.float32)),
    ], ids=["mask", "length", "offset", "bias"])  # fmt: skip
    def test_rows_that_see_nothing(self, options):
        def run(*arrays):
            return fusedops.attention(*arrays, **options, return_residual=True)

        (o, lse), vjp = jax.vjp(run, *draw())
        assert (o == 0).all() and (lse == -jnp.inf).all()
        for gradient in vjp((jnp.ones_like(o), jnp.ones_like(lse))):
            assert (gradient == 0).all()


def test_segments_are_separate_documents():
    q, k, v = draw(T=S, B=1)
    ids = jnp.array([[0, 0, 0, 1, 1, 1, 1, 2, 2]])
    got = fusedops.attention(q, k, v, query_segment_ids=ids, is_causal=True)
    for start, stop in ((0, 3), (3, 7), (7, 9)):
        alone = fusedops.attention(*(x[:, start:stop] for x in (q, k, v)), is_causal=True)
        np.testing.assert_allclose(got[:, start:stop], alone, rtol=1e-5, atol=1e-6)


def test_decoding_over_a_cache():
    """Chunks of 1, 3 and 5 tokens against a cache of fixed size that holds garbage beyond its length."""
    q, k, v = draw(T=S)
    whole = fusedops.attention(q, k, v, is_causal=True)
    step = jax.jit(functools.partial(fusedops.attention, is_causal=True))
    for start, stop in ((0, 1), (1, 4), (4, 9)):
        hide = (jnp.arange(S) < stop)[None, :, None, None]
        cache = [jnp.where(hide, x, jnp.nan) for x in (k, v)]
        got = step(q[:, start:stop], *cache, query_offset=start, key_value_seq_lengths=jnp.int32(stop))
        np.testing.assert_allclose(got, whole[:, start:stop], rtol=1e-5, atol=1e-6)


def test_leading_axes_and_vmap():
    q, k, v = (x.reshape(1, B, *x.shape[1:]) * jnp.ones((3, 1, 1, 1, 1)) for x in draw())
    lengths, mask = jnp.array([4, 9]), jnp.asarray(RULES["mask"]["mask"])
    fn = fusedops.attention
    got = fn(q, k, v, mask=mask, key_value_seq_lengths=lengths)
    each = lambda q, k, v, m, n: fn(q, k, v, mask=m, key_value_seq_lengths=n)
    mapped = jax.vmap(jax.vmap(each), (0, 0, 0, None, None))(q, k, v, mask, lengths)
    np.testing.assert_allclose(got, mapped, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got[1], fn(q[1], k[1], v[1], mask=mask, key_value_seq_lengths=lengths), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    arrays = draw(dtype)
    options = RULES["bias"] | RULES["sinks"] | RULES["window"]
    o = fusedops.attention(*arrays, **options)
    assert o.dtype == dtype
    np.testing.assert_allclose(o.astype(np.float32), truth(*arrays, **options)[0], rtol=2e-2, atol=1e-2)


class TestChoice:
    def test_explained(self):
        pytest.importorskip("triton")
        fn = functools.partial(fusedops.attention, logits_soft_cap=3.0, mask=RULES["mask"]["mask"])
        (entry,) = fusedops.explain(fn, *draw(), platform="cuda")
        assert entry.implementation == "xla" and "mask, logits_soft_cap" in entry.why

    def test_never_silently(self):
        with pytest.raises(NotImplementedError, match="the kernels do not take sinks yet"):
            fusedops.attention(*draw(), **RULES["sinks"], implementation="triton")


@pytest.mark.parametrize("options, error, message", [
    (dict(mask=np.zeros((1, T, S))), TypeError, "mask must be boolean"),
    (dict(mask=np.zeros((T, S), bool)), ValueError, "mask has shape"),
    (dict(mask=np.zeros((1, T, S + 1), bool)), ValueError, "S is 10"),
    (dict(bias=np.zeros((1, T, S), int)), TypeError, "bias must have a dtype of kind floating"),
    (dict(bias=np.zeros((3, 1, T, S), np.float32)), ValueError, "bias has shape"),
    (dict(local_window_size=-1), ValueError, "local_window_size must be >= 0"),
    (dict(local_window_size=(1, 2, 3)), ValueError, "a pair"),
    (dict(local_window_size=1.5), TypeError, "local_window_size must be an integer"),
    (dict(logits_soft_cap=0.0), ValueError, "logits_soft_cap must be positive"),
    (dict(query_seq_lengths=np.zeros(3, int)), ValueError, "query_seq_lengths has shape"),
    (dict(key_value_seq_lengths=np.zeros(B)), TypeError, "key_value_seq_lengths must have a dtype of kind integer"),
    (dict(key_value_segment_ids=np.zeros((B, S), int)), ValueError, "without query_segment_ids"),
    (dict(sinks=np.zeros(N + 1, np.float32)), ValueError, "sinks has shape"),
    (dict(query_offset=0.5), TypeError, "query_offset must have a dtype of kind integer"),
])  # fmt: skip
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        fusedops.attention(*draw(), **options)
