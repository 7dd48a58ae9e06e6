"""attention(): placeholder."""

import jax
import jax.numpy as jnp

from ._checks import check, check_choice


def attention(query, key, value, *, scale=None, is_causal=False, return_residual=False, implementation=None):
    """Placeholder."""
    s = check("attention", query=(query, "*B T N H"), key=(key, "*B S K H"), value=(value, "*B S K D"))
    check_choice("attention", "implementation", implementation, (None, "xla", "triton"))
    T, S, N, K, H = s["T"], s["S"], s["N"], s["K"], s["H"]
    scale = H**-0.5 if scale is None else scale
    wide = jnp.promote_types(query.dtype, jnp.float32)
    q = query.reshape(*s["B"], T, K, N // K, H)
    x = jnp.einsum("...tkgh,...skh->...kgts", q, key, preferred_element_type=wide) * scale
    visible = jnp.arange(T)[:, None] >= jnp.arange(S)[None] if is_causal else jnp.ones((T, S), bool)
    x = jnp.where(jnp.expand_dims(visible, tuple(range(x.ndim - 2))), x, -jnp.inf)
    lse = jax.nn.logsumexp(x, -1)
    p = jnp.exp(x - jnp.where(jnp.isfinite(lse), lse, 0)[..., None]).astype(value.dtype)
    o = jnp.einsum("...kgts,...skd->...tkgd", p, value).reshape(*s["B"], T, N, value.shape[-1]).astype(query.dtype)
    return (o, jnp.moveaxis(lse, -1, -3).reshape(*s["B"], T, N)) if return_residual else o
