"""Flax linen modules on fused ops."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

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
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    *,
    is_causal: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """`flax.linen.dot_product_attention` on `fusedops.attention`; also an `attention_fn` for Flax's modules.

    out = softmax(query @ key.T / sqrt(H)) @ value, per head.

    Shapes: query *B T N H, key *B S K H, value *B S K D, with N a multiple of K.

    Args:
      is_causal: query t sees the keys s <= t.
      implementation: as in `fusedops.attention`.
      The others: as in Flax.

    Returns:
      *B T N D, in the dtype in which Flax would return it.

    Numerics: softmax and sums are in float32, also where Flax would use the dtype of the operands. Flax's
    own function runs instead for a bias, a mask array, active dropout, `module` (which wants the
    weights sown), and functions for the matrix products; `fusedops.explain` says so.

    Raises:
      ValueError: dropout_rate is not in [0, 1), or dropout is active without dropout_rng.
      NotImplementedError: implementation="triton" with one of those.
    """
    reasons = (
        _hook.SOWING if module is not None else None,
        _hook.BIAS if bias is not None else None,
        _hook.MASK if mask is not None else None,
        _hook.dropout_reason(dropout_rate, deterministic, dropout_rng),
        _hook.EINSUM if einsum_dot_general or qk_attn_weights_einsum or attn_weights_value_einsum else None,
        _hook.precision_reason(precision),
    )
    if _hook.leave_kernels(reasons, implementation, "flax.linen.dot_product_attention", query, key, value):
        mask = _hook.fold_causal(mask, query, key) if is_causal else mask
        return nn.dot_product_attention(
            query, key, value, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic,
            dtype, precision, module, force_fp32_for_softmax, einsum_dot_general,
            qk_attn_weights_einsum, attn_weights_value_einsum,
        )  # fmt: skip
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    with _hook.matmul_precision(precision):
        out = attention(query, key, value, is_causal=is_causal, implementation=implementation)
    return out.astype(jnp.promote_types(out.dtype, jnp.float32)) if force_fp32_for_softmax else out


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention` on `fusedops.attention`.

    Constructor, call, parameters, initial values and cache are Flax's; two fields follow Flax's.

      layer = MultiHeadDotProductAttention(num_heads=8, is_causal=True)
      variables = layer.init(jax.random.key(0), x)   # x *B T E
      y = layer.apply(variables, x)                  # *B T E

    Fields:
      is_causal: query t sees the keys s <= t. This takes the place of `mask=nn.make_causal_mask(...)`:
        a mask that comes as an array is data, in which a compiled program cannot see that it is causal.
        With a mask, both hold. In decoding it changes nothing: the cache holds no later keys.
      implementation: None for the best that there is, "xla" for plain JAX, "triton" for the kernels or
        an error.
      attention_fn: if it is not the default, it must take the other two fields where they are set.
      The others: as in Flax.

    Flax's own attention runs for what `dot_product_attention` lists, decoding steps included, which bring
    a mask; `fusedops.explain` says so.
    """

    attention_fn: Callable[..., jax.Array] = dot_product_attention
    is_causal: bool = False
    implementation: str | None = None

    def __post_init__(self) -> None:
        options = dict(is_causal=self.is_causal, implementation=self.implementation)
        object.__setattr__(self, "attention_fn", _hook.with_options(self.attention_fn, self.decode, **options))
        super().__post_init__()
