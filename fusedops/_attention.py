"""Attention: docs, checks, reference, custom VJP."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ._attention_rules import Rules, check_rules
from ._attention_rules import reference as reference_with_rules
from ._checks import check, check_choice, check_dtype, check_number
from ._dispatch import IMPLEMENTATIONS, Op, note, run, varying_alike

MAX_HEAD_DIM = 256


class Options(NamedTuple):
    """What is fixed when a call is traced. `precision` is JAX's matmul precision at that time."""

    scale: float
    is_causal: bool
    precision: str | None
    implementation: str | None


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_offset: Any = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    return_residual: bool = False,
    implementation: str | None = None,
) -> Any:
    """Scaled dot-product attention, a superset of `jax.nn.dot_product_attention`.

        O = softmax(mask(soft_cap(scale * Q K^T + bias))) V

    B = leading (batch) axes, T = query length, S = key and value length, N = query heads, K = key and
    value heads (N is a multiple of K; each serves N/K neighbouring query heads), H = head dim of query
    and key, D = head dim of value.

    Args:
      query: *B T N H, with any number of leading axes.
      key: *B S K H.
      value: *B S K D.
      bias: added to the scaled logits; floating, and broadcasts to *B N T S.
      mask: True where a query sees a key; boolean, and broadcasts to *B N T S. All rules hold together.
      scale: of the logits; default H**-0.5.
      is_causal: query t sees keys s <= t (aligned top-left):

          T = 3, S = 5:   1 0 0 0 0
                          1 1 0 0 0
                          1 1 1 0 0
      query_offset: the position of query 0 among the keys, for `is_causal` and windows; an integer, or an
        integer array that broadcasts to *B. S - T aligns bottom-right; with a cache of keys it is the number
        of tokens in the cache before this call. Causal with query_offset = 2:

          T = 3, S = 5:   1 1 1 0 0
                          1 1 1 1 0
                          1 1 1 1 1
      query_seq_lengths, key_value_seq_lengths: how many queries and keys there are, the others being
        padding; integers that broadcast to *B.
      local_window_size: (left, right), how many neighbours on each side a query sees beside its own
        position; one integer for both. (1, 0):

          T = 3, S = 5:   1 0 0 0 0
                          1 1 0 0 0
                          0 1 1 0 0
      query_segment_ids, key_value_segment_ids: integers *B T and *B S, each of which may broadcast along *B; a
        query sees the keys of its own segment. Without the second, the first stands for both.
      logits_soft_cap: a positive number c; logits become c * tanh(logits / c), before any mask.
      sinks: N floating logits, one per query head, of a key without value: they take a share of the softmax.
      return_residual: also return the logsumexp of each row of logits, its sink included.
      implementation: None for the best that there is (the kernels on a CUDA GPU, else plain JAX), "xla"
        for plain JAX, "triton" for the kernels or an error. `fusedops.explain` says what runs and why.

    Returns:
      *B T N D in the dtype of query; with `return_residual` a pair of it and the logsumexp (natural
      logarithm), *B T N in float32, which has gradients, too.

    Numerics: float16, bfloat16 and float32 by the kernels; logits, softmax and sums are in float32, and
    the probabilities are rounded to the dtype of value before they multiply it. The kernels take scale and
    is_causal so far; every other option runs plain JAX, which holds all logits in memory. Products of float32 follow
    `jax.default_matmul_precision`: TF32 on a GPU unless it is "highest" or "float32". float64 and complex
    dtypes run plain JAX. A row that sees no key gives 0, logsumexp -inf (its sink, if it has one) and zero
    gradients. NaN or
    infinities in keys and values that a row does not see do not reach its result. Results are the same
    bits from run to run.

    Gradients: reverse mode, first order; with implementation="xla" any mode and order. The results are
    named "fusedops_attention_out" and "fusedops_attention_lse" for `jax.checkpoint` policies.

    Raises:
      ValueError: shapes do not fit each other, dtypes differ, `implementation` is unknown, or a number is
        out of its range.
      TypeError: an argument is not an array of the kind that it must be, or not a number.
      NotImplementedError: implementation="triton" and the kernels do not cover the case.

    Sources: Attention Is All You Need, https://arxiv.org/abs/1706.03762; FlashAttention-2,
    https://arxiv.org/abs/2307.08691; grouped heads, https://arxiv.org/abs/2305.13245; windows,
    https://arxiv.org/abs/2004.05150; soft cap, https://arxiv.org/abs/2408.00118; sinks,
    https://arxiv.org/abs/2309.17453 and https://arxiv.org/abs/2508.10925.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    sizes = _check(query, key, value)
    check_choice("attention", "implementation", implementation, IMPLEMENTATIONS)
    if scale is None:
        scale = max(sizes["H"], 1) ** -0.5
    check_number("attention", "scale", scale)
    rules = check_rules(query, key, value, dict(
        bias=bias, mask=mask, query_offset=query_offset, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
        query_segment_ids=query_segment_ids, key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap, sinks=sinks,
    ))  # fmt: skip
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    options = Options(float(scale), bool(is_causal), precision, implementation)

    lead = sizes["B"]
    q, k, v = (x.reshape(-1 if x.size else _product(lead), *x.shape[-3:]) for x in (query, key, value))
    o, lse = _choose(options, rules, q, k, v)
    o = o.reshape(*lead, *o.shape[1:])
    if not return_residual:
        return o
    return o, jnp.swapaxes(lse, 1, 2).reshape(*o.shape[:-1])


def _check(query: jax.Array, key: jax.Array, value: jax.Array) -> dict[str, Any]:
    sizes = check("attention", query=(query, "*B T N H"), key=(key, "*B S K H"), value=(value, "*B S K D"))
    check_dtype("attention", jnp.inexact, query=query, key=key, value=value)
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            "attention: query, key and value must have one dtype, got "
            f"{query.dtype}, {key.dtype} and {value.dtype}; convert them with astype"
        )
    heads, kv_heads = sizes["N"], sizes["K"]
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(
            f"attention: query has {heads} heads, which must be a multiple of the {kv_heads} heads of key "
            "and value; change the number of heads"
        )
    return sizes


def _product(sizes: tuple[int, ...]) -> int:
    return functools.reduce(lambda a, b: a * b, sizes, 1)


def _choose(options: Options, rules: Rules, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Plain JAX with its own derivatives, or the op with ours."""
    why, names = None, rules.given()
    if options.implementation == "xla":
        why = 'implementation="xla" was asked for'
    elif names:
        why = f"the kernels do not take {names} yet"
        if options.implementation == "triton":
            raise NotImplementedError(f'attention: implementation="triton" cannot do this: {why}')
    elif options.implementation is None and (unsupported := _refuse_dtype(arrays[0].dtype)):
        why = unsupported
    if why is None:
        return _attention(options, *varying_alike(*arrays))
    note("attention", why, *arrays)
    plain = functools.partial(reference_with_rules, rules, options.scale, options.is_causal, options.precision)
    if names:
        return plain(*arrays)
    if options.is_causal and not jnp.iscomplexobj(arrays[0]):
        q, k, v = arrays
        return plain(q, k[:, : q.shape[1]], v[:, : q.shape[1]])  # no query sees the keys after these
    return _forward_reference(options, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: Options, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    o, lse = run(FORWARD, options, q, k, v, implementation=options.implementation)
    return o, lse


def _attention_fwd(options: Options, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    o, lse = run(FORWARD, options, q, k, v, implementation=options.implementation)
    o = checkpoint_name(o, "fusedops_attention_out")
    lse = checkpoint_name(lse, "fusedops_attention_lse")
    return (o, lse), (q, k, v, o, lse)


def _attention_bwd(options: Options, residuals: Any, cotangents: Any) -> Any:
    return run(BACKWARD, options, *residuals, *cotangents, implementation=options.implementation)


_attention.defvjp(_attention_fwd, _attention_bwd)


def _visible(options: Options, t: int, s: int) -> jax.Array | None:
    """Which keys each query sees, t s, for use under fusion; None for all."""
    if not options.is_causal:
        return None
    offs_t = jax.lax.broadcasted_iota(jnp.int32, (t, s), 0)
    return jax.lax.broadcasted_iota(jnp.int32, (t, s), 1) <= offs_t


def _scores(options: Options, q: jax.Array, k: jax.Array) -> jax.Array:
    """Scaled logits, b k g t s, at least float32; -inf where masked."""
    x = _einsum(options, "btkgh,bskh->bkgts", _grouped(q, k), k) * options.scale
    return _masked(_visible(options, *x.shape[-2:]), x, -jnp.inf)


def _masked(visible: jax.Array | None, x: jax.Array, fill: float) -> jax.Array:
    return x if visible is None else jnp.where(visible[None, None, None], x, fill)


def _grouped(x: jax.Array, k: jax.Array) -> jax.Array:
    """b t n ... -> b t k g ..., for the heads k of the keys."""
    b, t, n = x.shape[:3]
    heads = k.shape[2]
    return x.reshape(b, t, heads, n // max(heads, 1), *x.shape[3:])


def _einsum(options: Options, equation: str, *arrays: jax.Array) -> jax.Array:
    wide = jnp.promote_types(arrays[0].dtype, jnp.float32)
    return jnp.einsum(equation, *arrays, precision=options.precision, preferred_element_type=wide)


def _clean(x: jax.Array) -> jax.Array:
    """x with 0 for NaN and infinities: a causal mask hides them from some rows, and 0 * NaN would not."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def _has_bad(x: jax.Array) -> jax.Array:
    """Which rows have a NaN or an infinity; queries that see such a row of v get NaN."""
    return jnp.any(~jnp.isfinite(x), axis=-1)


def _forward_reference(options: Options, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """q: b t n h, k: b s k h, v: b s k d -> o: b t n d, lse: b n t."""
    (b, t, n, _), d = q.shape, v.shape[-1]
    if options.is_causal:  # no query sees the keys from t on
        k, v = k[:, :t], v[:, :t]
    x = _scores(options, q, k)
    m = jax.lax.stop_gradient(jnp.max(x.real, axis=-1, keepdims=True, initial=-jnp.inf))
    m = jnp.where(m == -jnp.inf, 0, m)
    p = jnp.exp(x - m)
    l = jnp.sum(p, axis=-1, keepdims=True)
    empty = l == 0
    l = jnp.where(empty, 1, l)
    o = _einsum(options, "bkgts,bskd->bkgtd", p.astype(v.dtype), _clean(v) if options.is_causal else v) / l
    if options.is_causal:
        first_bad = jnp.min(jnp.where(_has_bad(v), jnp.arange(v.shape[1])[None, :, None], t), 1, initial=t)
        o = jnp.where((jnp.arange(t)[None, None] >= first_bad[..., None])[:, :, None, :, None], jnp.nan, o)
    lse = jnp.where(empty, -jnp.inf, m + jnp.log(l))
    o = jnp.moveaxis(o, 3, 1).reshape(b, t, n, d).astype(q.dtype)
    return o, lse.reshape(b, n, t)


def _backward_reference(
    options: Options, q: jax.Array, k: jax.Array, v: jax.Array, o: jax.Array, lse: jax.Array, do: jax.Array,
    dlse: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """dq, dk and dv from what the forward pass keeps:

    p = exp(x - lse),  dp = do v^T,  delta = rowsum(p * dp) - dlse,  ds = p * (dp - delta)
    dq = scale * ds k,  dk = scale * ds^T q,  dv = p^T do

    delta is rowsum(o * do) - dlse, too, as the kernels have it; here p is at hand, and o was rounded. Rows of p
    are brought to sum 1 again: x, computed twice, may differ in its last bit from what lse was taken of.
    """
    (b, t, n, _h), s = q.shape, k.shape[1]
    if options.is_causal:
        k, v = k[:, :t], v[:, :t]
    rows = lambda x: x.reshape(b, k.shape[2], n // max(k.shape[2], 1), t)
    lse = rows(jnp.where(lse == -jnp.inf, jnp.inf, lse))
    visible = _visible(options, t, k.shape[1])
    p = _masked(visible, jnp.exp(_scores(options, q, k) - lse[..., None]), 0)
    l = jnp.sum(p, axis=-1, keepdims=True)
    p = _masked(visible, p / jnp.where(l == 0, 1, l), 0)
    do_ = _grouped(do, k)
    dp = _einsum(options, "btkgd,bskd->bkgts", do_, v)
    delta = jnp.sum(_masked(visible, p * dp, 0), axis=-1) - rows(dlse)
    ds = _masked(visible, p * (dp - delta[..., None]), 0).astype(q.dtype)
    hide = _clean if options.is_causal else lambda x: x
    dq = _einsum(options, "bkgts,bskh->btkgh", ds, hide(k)) * options.scale
    dk = _einsum(options, "bkgts,btkgh->bskh", ds, hide(_grouped(q, k))) * options.scale
    dv = _einsum(options, "bkgts,btkgd->bskd", p.astype(do.dtype), hide(do_))
    if options.is_causal:
        rows_bad = jnp.any(_has_bad(do_), axis=3)  # b t k
        last_bad = jnp.max(jnp.where(rows_bad, jnp.arange(t)[None, :, None], -1), 1, initial=-1)
        dv = jnp.where((jnp.arange(v.shape[1])[None, :, None] <= last_bad[:, None])[..., None], jnp.nan, dv)
    more = [(0, 0), (0, s - k.shape[1]), (0, 0), (0, 0)]
    return dq.reshape(q.shape).astype(q.dtype), jnp.pad(dk, more).astype(k.dtype), jnp.pad(dv, more).astype(v.dtype)


def _refuse_dtype(dtype: Any) -> str | None:
    if dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        return f"dtype {jnp.dtype(dtype).name}; the kernels take float16, bfloat16 and float32"
    return None


def _refuse(options: Options, q: Any, k: Any, v: Any, *_: Any) -> str | None:
    for name, size in (("query and key", q.shape[-1]), ("value", v.shape[-1])):
        if not 1 <= size <= MAX_HEAD_DIM:
            return f"head dim {size} of {name}; the kernels take 1 to {MAX_HEAD_DIM}"
    return _refuse_dtype(q.dtype)


def _launch_forward(options: Options, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    from .kernels import attention as kernels

    return kernels.attention_fwd(*arrays, options=options)


def _launch_backward(options: Options, *arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    from .kernels import attention as kernels

    return kernels.attention_bwd(*arrays, options=options)


def _describe_forward(options: Options, q: Any, k: Any, v: Any) -> str:
    from .kernels import attention as kernels

    return kernels.describe(options, q, v, "fwd")


def _describe_backward(options: Options, q: Any, k: Any, v: Any, *_: Any) -> str:
    from .kernels import attention as kernels

    return kernels.describe(options, q, v, "dkdv", "dq")


_QKV = ("b t n h", "b s k h", "b s k d")
FORWARD = Op("attention", _QKV, ("b t n d", "b n t"), _forward_reference, _launch_forward, _refuse, _describe_forward)
BACKWARD = Op(
    "attention gradient", (*_QKV, "b t n d", "b n t", "b t n d", "b n t"), _QKV,
    _backward_reference, _launch_backward, _refuse, _describe_backward,
)  # fmt: skip
