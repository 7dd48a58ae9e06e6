"""Flax nnx modules on fused ops."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn import dtypes

from .._attention import attention
from . import _hook


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: nnx.Module | None = None,
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
    is_causal: bool = False,
    *,
    input_positions: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`flax.nnx.dot_product_attention` on `fusedops.attention`; also an `attention_fn` for Flax's modules.

    out = softmax(query @ key.T / sqrt(H)) @ value, per head.

    Shapes: query *B T N H, key *B S K H, value *B S K D, with N a multiple of K.

    Args:
      is_causal: query t sees the keys s <= t.
      input_positions: must be None: positions are for an `attention_fn` that rotates by them.
      implementation: as in `fusedops.attention`.
      The others: as in Flax.

    Returns:
      *B T N D.

    Numerics: softmax and sums are in float32. Flax's own function runs instead for a bias, a mask array,
    active dropout, and `module` (which wants the weights sown); `fusedops.explain` says so.

    Raises:
      ValueError: dropout_rate is not in [0, 1), dropout is active without dropout_rng, or
        input_positions are given.
      NotImplementedError: implementation="triton" with one of those.
    """
    if input_positions is not None:
        raise ValueError(
            "input_positions: this attention_fn has no rotary embedding, expected None; to rotate by "
            "positions pass attention_fn=functools.partial(flax.nnx.dot_product_attention_with_rope, rope=...)"
        )
    reasons = (
        _hook.SOWING if module is not None else None,
        _hook.BIAS if bias is not None else None,
        _hook.MASK if mask is not None else None,
        _hook.dropout_reason(dropout_rate, deterministic, dropout_rng),
        _hook.precision_reason(precision),
    )
    if _hook.leave_kernels(reasons, implementation, "flax.nnx.dot_product_attention", query, key, value):
        mask = _hook.fold_causal(mask, query, key) if is_causal else mask
        return nnx.dot_product_attention(
            query, key, value, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic,
            dtype, precision, module, promote_dtype,
        )  # fmt: skip
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    with _hook.matmul_precision(precision):
        return attention(query, key, value, is_causal=is_causal, implementation=implementation)


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` on `fusedops.attention`.

    Constructor, call, parameters, initial values and cache are Flax's; two keywords follow Flax's.

      layer = MultiHeadAttention(8, in_features=512, num_kv_heads=2, decode=False, is_causal=True, rngs=nnx.Rngs(0))
      y = layer(x)   # x *B T 512 -> *B T 512

    Args:
      is_causal: query t sees the keys s <= t, in every call; the same argument of a call asks for it in
        that call. With a mask, both hold. In decoding it changes nothing: the cache holds no later keys.
      implementation: None for the best that there is, "xla" for plain JAX, "triton" for the kernels or
        an error.
      attention_fn: if it is not the default, it must take `implementation` where that is set.
      The others: as in Flax.

    Flax's own attention runs for what `dot_product_attention` lists, decoding steps included, which bring
    a mask; `fusedops.explain` says so.
    """

    @_hook.signed_like(
        nnx.MultiHeadAttention.__init__, attention_fn=dot_product_attention, is_causal=False, implementation=None
    )
    def __init__(
        self,
        *args: Any,
        attention_fn: Callable[..., jax.Array] = dot_product_attention,
        is_causal: bool = False,
        implementation: str | None = None,
        **kwargs: Any,
    ):
        self.is_causal = is_causal
        self.implementation = implementation
        attention_fn = _hook.with_options(attention_fn, implementation=implementation)
        super().__init__(*args, attention_fn=attention_fn, **kwargs)

    @_hook.signed_like(nnx.MultiHeadAttention.__call__)
    def __call__(self, *args: Any, decode: bool | None = None, is_causal: bool = False, **kwargs: Any) -> jax.Array:
        decodes = self.decode if decode is None else decode
        is_causal = (is_causal or self.is_causal) and not decodes
        return super().__call__(*args, decode=decode, is_causal=is_causal, **kwargs)
