"""Attention with every option, in plain JAX: which keys a query sees, and what is added to the logits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._checks import check, check_dtype, check_int, check_number

BROADCAST = "*#B #N #T #S"
TITLE = "attention"


class Rules(NamedTuple):
    """What the kernels do not take yet; None where there is no such rule. b = product of the leading axes;
    any b, n, t or s may be 1.

    Fields:
      bias, mask: b n t s.
      query_offset, query_seq_lengths, key_value_seq_lengths: b.
      query_segment_ids, key_value_segment_ids: b t and b s.
      sinks: n.
      window: how many neighbours to the left and to the right a query sees.
      soft_cap: a number.
    """

    bias: Any = None
    mask: Any = None
    query_offset: Any = None
    query_seq_lengths: Any = None
    key_value_seq_lengths: Any = None
    query_segment_ids: Any = None
    key_value_segment_ids: Any = None
    sinks: Any = None
    window: tuple[int, int] | None = None
    soft_cap: float | None = None

    def given(self) -> str:
        """The names of those that are there, as the caller knows them."""
        names = {"window": "local_window_size", "soft_cap": "logits_soft_cap"}
        return ", ".join(names.get(k, k) for k, v in self._asdict().items() if v is not None)


def check_rules(query: jax.Array, key: jax.Array, value: jax.Array, given: dict[str, Any]) -> Rules:
    """The rules of a call, checked and with one leading axis.

    Raises:
      ValueError, TypeError: as `attention` says.
    """
    window, cap = _window(given.pop("local_window_size")), given.pop("logits_soft_cap")
    if cap is not None:
        check_number(TITLE, "logits_soft_cap", cap)
        if not cap > 0:
            raise ValueError(f"{TITLE}: logits_soft_cap must be positive, got {cap}; pass None for no cap")
    if given["query_segment_ids"] is not None and given["key_value_segment_ids"] is None:
        given["key_value_segment_ids"] = given["query_segment_ids"]
    if given["query_segment_ids"] is None and given["key_value_segment_ids"] is not None:
        raise ValueError(f"{TITLE}: key_value_segment_ids come without query_segment_ids; pass both")
    arrays = {name: None if x is None else jnp.asarray(x) for name, x in given.items()}
    lead = query.shape[:-3]
    axes = dict(
        bias=BROADCAST, mask=BROADCAST, query_offset="*#B", query_seq_lengths="*#B", key_value_seq_lengths="*#B",
        query_segment_ids="*#B T", key_value_segment_ids="*#B S", sinks="N",
    )  # fmt: skip
    check(
        TITLE, query=(query, "*B T N H"), key=(key, "*B S K H"), value=(value, "*B S K D"),
        **{name: (x, axes[name]) for name, x in arrays.items()},
    )  # fmt: skip
    mask = arrays["mask"]
    if mask is not None and mask.dtype != jnp.bool:
        raise TypeError(
            f"{TITLE}: mask must be boolean (True where a key is seen), got {mask.dtype}; pass mask != 0, or "
            "what is to be added to the logits as bias"
        )
    check_dtype(TITLE, jnp.floating, bias=arrays["bias"], sinks=arrays["sinks"])
    if window or cap or any(x is not None for x in arrays.values()):
        check_dtype(TITLE, jnp.floating, query=query)
    whole = [k for k in axes if k.startswith(("query_", "key_"))]
    check_dtype(TITLE, jnp.integer, **{name: arrays[name] for name in whole})
    for name, x in arrays.items():
        if x is not None and name != "sinks":
            arrays[name] = _one_lead(x, lead, len(axes[name].split()) - 1)
    return Rules(**arrays, window=window, soft_cap=None if cap is None else float(cap))


def _window(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(pair) != 2:
        raise ValueError(f"{TITLE}: local_window_size must be an int or a pair (left, right), got {size!r}")
    for part in pair:
        check_int(TITLE, "local_window_size", part, low=0)
    return int(pair[0]), int(pair[1])


def _one_lead(x: jax.Array, lead: tuple[int, ...], rank: int) -> jax.Array:
    """Folds the leading axes into one, of size 1 if x is the same along all of them."""
    own, rest = x.shape[: x.ndim - rank], x.shape[x.ndim - rank :]
    if all(size == 1 for size in own):
        return x.reshape(1, *rest)
    size = 1
    for n in lead:
        size *= n
    return jnp.broadcast_to(x, (*lead, *rest)).reshape(size, *rest)


def _visible(rules: Rules, is_causal: bool, t: int, s: int) -> jax.Array:
    """Which keys each query sees: b n t s, of which b, n and t may be 1."""
    offset = jnp.zeros(1, jnp.int32) if rules.query_offset is None else rules.query_offset
    row = jnp.arange(t)[None, :, None]
    at = row + offset[:, None, None]  # the position of a query among the keys
    keys = jnp.arange(s)[None, None]
    seen = jnp.ones((1, 1, s), bool)
    if is_causal:
        seen &= keys <= at
    if rules.window is not None:
        left, right = rules.window
        seen &= (keys >= at - left) & (keys <= at + right)
    if rules.query_seq_lengths is not None:
        seen &= row < rules.query_seq_lengths[:, None, None]
    if rules.key_value_seq_lengths is not None:
        seen &= keys < rules.key_value_seq_lengths[:, None, None]
    if rules.query_segment_ids is not None:
        seen &= rules.query_segment_ids[:, :, None] == rules.key_value_segment_ids[:, None]
    return seen[:, None] if rules.mask is None else seen[:, None] & rules.mask


def reference(
    rules: Rules, scale: float, is_causal: bool, precision: Any, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """q: b t n h, k: b s k h, v: b s k d -> o: b t n d in the dtype of q, lse: b n t.

    What a row does not see may be NaN: it is 0 in every product, and rows that see it become NaN after that.
    """
    (b, t, n, _), (s, kv, d) = q.shape, v.shape[1:]
    g = n // max(kv, 1)
    wide = jnp.promote_types(q.dtype, jnp.float32)

    def dot(equation: str, *arrays: jax.Array) -> jax.Array:
        return jnp.einsum(equation, *arrays, precision=precision, preferred_element_type=wide)

    def heads(x: jax.Array) -> jax.Array:  # b n t s -> b k g t s
        return x.reshape(x.shape[0], kv, g, *x.shape[2:]) if x.shape[1] == n else x[:, None]

    bad = lambda x: jnp.moveaxis(~jnp.isfinite(x).all(-1), 1, 2)  # b t n h -> b n t
    clean = lambda x: jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))
    rows, keys = heads(bad(q)[..., None]), bad(k)[:, :, None, None]
    x = dot("btkgh,bskh->bkgts", clean(q).reshape(b, t, kv, g, q.shape[-1]), clean(k)) * scale
    x = jnp.where(rows | keys, jnp.nan, x)
    if rules.bias is not None:
        x = x + heads(rules.bias.astype(wide))
    if rules.soft_cap is not None:
        x = rules.soft_cap * jnp.tanh(x / rules.soft_cap)
    seen = heads(_visible(rules, is_causal, t, s))
    x = jnp.where(seen, x, -jnp.inf)
    m = jnp.max(x, axis=-1, keepdims=True, initial=-jnp.inf)
    sink = None
    if rules.sinks is not None:
        sink = rules.sinks.astype(wide).reshape(1, kv, g, 1, 1)
        m = jnp.maximum(m, sink)
    m = jax.lax.stop_gradient(jnp.where(m == -jnp.inf, 0, m))
    p = jnp.where(seen, jnp.exp(x - m), 0)
    l = jnp.sum(p, axis=-1, keepdims=True)
    if sink is not None:
        l = l + jnp.exp(sink - m)
    empty = l == 0
    l = jnp.where(empty | jnp.isnan(l), 1, l)  # rows of NaN: p has them, and here they would reach other gradients
    o = dot("bkgts,bskd->bkgtd", p.astype(v.dtype), clean(v)) / l
    o = jnp.where(jnp.any(seen & bad(v)[:, :, None, None], axis=-1, keepdims=True), jnp.nan, o)
    lse = jnp.where(empty, -jnp.inf, m + jnp.log(l))
    return jnp.moveaxis(o, 3, 1).reshape(b, t, n, d).astype(q.dtype), lse.reshape(b, n, t)
